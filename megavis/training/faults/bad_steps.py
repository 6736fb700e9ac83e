"""Detect bad steps (non-finite gradients and loss spikes), and roll back to a step before them.

A step with non-finite gradients leaves weights and moments unchanged. A spike changes the weights
and is detected two steps later, since no step waits for its own loss.

"PaLM: Scaling Language Modeling with Pathways", section 5.1: after a loss spike, training was
restarted from a checkpoint about 100 steps before it, and about 200 to 500 batches before and
during the spike were skipped; the same data did no harm at another point of training.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from megavis.checkpoint.format.folder import saved_steps, set_aside, step_folder
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LossHistory,
    RollbackRecord,
    write_manifest,
)
from megavis.checkpoint.state.restore import Found, newest_intact_checkpoint
from megavis.config.errors import GivenUpError, counted
from megavis.config.schema import CheckpointConfig, TrainingConfig
from megavis.parallel.agreement import DelayedMean
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import StepState
from megavis.training.metrics import MetricsWriter, drop_watched, read_metrics

# For a normal distribution, the standard deviation over the median distance from the median.
_DEVIATION = 1.4826
# Changes below this fraction of the loss are never spikes, even if the loss is nearly constant.
_LEAST_SHARE = 1e-3


class WatchBadSteps:
    """A callback that names bad steps and counts them in the metrics.

    `history` and `batches_skipped` come from the checkpoint that the run resumes from. Creation
    is collective over all processes.

    Attributes:
        judge: detects spikes.
        streak: the bad steps that require a rollback or the end of training, if any.
    """

    def __init__(
        self,
        settings: TrainingConfig,
        saving: CheckpointConfig,
        *,
        history: LossHistory,
        batches_skipped: int,
    ) -> None:
        self.settings, self.saving, self.batches_skipped = settings, saving, batches_skipped
        self.judge = SpikeDetector(settings.spike_threshold, settings.spike_window, history)
        self.streak: BadStepStreak | None = None
        self._means = DelayedMean()
        self._counts: Counter[str] = Counter()

    def __call__(self, state: StepState) -> None:
        """Check the steps known so far; if a line or a checkpoint is due, all of them."""
        if state.loss is None:
            return
        skipped = state.engine.last_step_was_skipped()
        values = torch.stack([state.loss.detach().float(), skipped])
        known = self._means.exchange(state.step, values)
        # A checkpoint holds the losses of all earlier steps, so that a resumed run makes the same
        # decisions.
        due = state.is_due(self.settings.log_every) or state.needs_checkpoint(self.saving)
        if due or state.is_last:
            known += self._means.settle()
        for step, (loss, was_skipped) in known:
            if self.streak is None:
                self._look(state, step, loss, was_skipped=bool(was_skipped))
        if state.is_due(self.settings.log_every):
            state.record.update(self._counts)
            self._counts.clear()
        if self.streak is not None:
            state.rolls_back = True
            state.stop = "too many bad steps in a row"

    def _look(self, state: StepState, step: int, loss: float, *, was_skipped: bool) -> None:
        if was_skipped and self.settings.precision == "fp16":
            return  # the loss scale is found by skipping steps
        is_bad = was_skipped or self.judge.is_spike(loss)
        in_a_row = self.judge.take(step, loss, is_bad=is_bad)
        if not is_bad:
            return
        self._counts["steps_skipped" if was_skipped else "loss_spikes"] += 1
        if state.engine.context.is_main:
            what = "is skipped, its gradients are not finite"
            if not was_skipped:
                what = f"has a loss of {loss:.6g}, far above those before it"
            size = self.settings.batch_size
            first = (step - 1 + self.batches_skipped) * size
            where = f"positions {first} to {first + size - 1} of the sample order"
            tqdm.write(f"WARNING: step {step} {what}; its images are at {where}", file=sys.stderr)
        # A resumed run may have a lower limit.
        if 0 < self.settings.max_bad_steps <= in_a_row:
            first = self.judge.bad_since or step
            self.streak = BadStepStreak(first, step, step + self.batches_skipped)


@dataclass(frozen=True)
class BadStepStreak:
    """A streak of bad steps that reached the limit; steps count from 1."""

    first: int
    last: int
    next_batch: int
    """The batch after the last bad one in the sample order, counted from 0."""


class BadStepsError(GivenUpError):
    """Too many bad steps in a row up to `step`, and no rollback is allowed or possible."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step


class SpikeDetector:
    """Detects loss spikes from the losses alone, so identically in every layout.

    A loss is a spike if it lies more than `threshold` deviations above the median of the last
    `window` good ones; with `threshold` 0 no finite loss is. The deviation is 1.4826 times the
    median distance from that median, which a few odd losses do not move; it counts as at least a
    thousandth of the median. `bad_since` is the first step of the current streak of bad steps, if
    any.
    """

    def __init__(self, threshold: float, window: int, history: LossHistory) -> None:
        self.threshold, self.window = threshold, window
        self._recent = deque(history.recent, maxlen=window)
        self.bad_since, self._bad_steps = history.bad_since, history.bad_steps

    @property
    def history(self) -> LossHistory:
        """State stored in checkpoints, so that a resumed run makes the same decisions."""
        return LossHistory(
            recent=tuple(self._recent), bad_since=self.bad_since, bad_steps=self._bad_steps
        )

    def is_spike(self, loss: float) -> bool:
        """Compare a loss with earlier ones; return False until there are enough of them."""
        if not math.isfinite(loss):
            return True
        if not self.threshold or len(self._recent) < self.window:
            return False
        # Medians, since the spikes themselves would shift a mean and a standard deviation.
        median = statistics.median(self._recent)
        distance = statistics.median(abs(one - median) for one in self._recent)
        deviation = max(_DEVIATION * distance, _LEAST_SHARE * abs(median))
        return loss > median + self.threshold * deviation

    def take(self, step: int, loss: float, *, is_bad: bool) -> int:
        """Record a step; return the number of bad steps in the streak that it ends."""
        if not is_bad:
            self._recent.append(loss)
            self.bad_since, self._bad_steps = None, 0
            return 0
        self.bad_since = self.bad_since or step
        self._bad_steps += 1
        return self._bad_steps


def roll_back(
    run_folder: Path, streak: BadStepStreak, settings: TrainingConfig, context: ParallelContext
) -> Found:
    """Return the checkpoint to resume from, with the skipped data recorded in it.

    Called on every process. Newer checkpoints are set aside. A resumed run skips the same data, in
    any layout.

    Raises:
        BadStepsError: on every process, if rollback is not allowed, or no checkpoint is old enough.
        OSError: likewise, if the checkpoint cannot be written.
    """
    count = streak.last - streak.first + 1
    steps = (
        f"step {streak.last} was"
        if count == 1
        else f"{count} steps in a row, up to step {streak.last}, were"
    )
    what = f"{steps} bad (training.max_bad_steps)"
    advice = "lower optimizer.learning_rate, or check the images at the positions above"
    if not settings.max_rollbacks:
        text = f"{what}: {advice}, or allow rollbacks (training.max_rollbacks)"
        raise BadStepsError(streak.last, text)
    found = newest_intact_checkpoint(
        run_folder, context, up_to=streak.first - 1 - settings.rollback_margin
    )
    if found is None:
        raise BadStepsError(
            streak.last,
            f"{what}, and no checkpoint is {counted(settings.rollback_margin, 'step')}"
            f" (training.rollback_margin) older than the first of them: {advice}",
        )
    folder, manifest = found
    times = 1 + (manifest.rolled_back.times if manifest.rolled_back else 0)
    if times > settings.max_rollbacks:
        raise BadStepsError(
            streak.last,
            f"{what}, after {times - 1} rollbacks to step {manifest.step}"
            f" (training.max_rollbacks): {advice}",
        )
    changed = manifest.model_copy(
        update={
            # Step s, counted from 0, reads batch s + batches_skipped; the first one after the
            # rollback has s = manifest.step.
            "batches_skipped": streak.next_batch + settings.rollback_margin - manifest.step,
            "rolled_back": RollbackRecord(
                times=times, first_bad_step=streak.first, last_bad_step=streak.last
            ),
        }
    )
    context.on_main(lambda: _resume_from(run_folder, folder, changed))
    return folder, changed


def _resume_from(run_folder: Path, folder: Path, changed: CheckpointManifest) -> None:
    """Write the changed manifest. Raises OSError."""
    # `latest` may be older than they are: past a damaged checkpoint it names `folder` already.
    steps = [step for step in saved_steps(run_folder) if step > changed.step]
    newer = [step_folder(run_folder, step) for step in steps]
    # Do this first: a kill in between leaves a run that repeats the bad steps.
    set_aside(run_folder, newer, newest=folder)
    drop_watched(run_folder, changed.step)
    write_manifest(folder, changed)
    sys.stderr.write(
        f"WARNING: rolling back to {folder}, and continuing with batch"
        f" {changed.step + changed.batches_skipped} of the sample order\n"
    )


def record_rollback(metrics: MetricsWriter, run_folder: Path, manifest: CheckpointManifest) -> None:
    """Write the rollback's record at the step that it returned to, if missing."""
    event = manifest.rolled_back
    if event is None:
        return
    values = {
        "rolled_back_from": event.last_bad_step,
        "first_bad_step": event.first_bad_step,
        "times_gone_back": event.times,
        "batches_skipped": manifest.batches_skipped,
    }
    if {"step": manifest.step, **values} not in read_metrics(run_folder):
        metrics.write(manifest.step, values)
