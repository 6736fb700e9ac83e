"""Detect bad steps: non-finite gradients, and loss spikes.

A step with non-finite gradients leaves weights and moments unchanged. A spike changes the weights
and is detected two steps later, since no step waits for its own loss.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter, deque
from dataclasses import dataclass

import torch
from tqdm import tqdm

from megavis.checkpoint.format.manifest import LossHistory
from megavis.config.schema import CheckpointConfig, TrainingConfig
from megavis.parallel.agreement import DelayedMean
from megavis.training.callbacks.base import StepState

# Of a normal distribution, the standard deviation over the median distance from the median.
_DEVIATION = 1.4826
# A loss that hardly moves is no spike for moving by less than this share of it.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class BadStepStreak:
    """A streak of bad steps as long as is tolerated; steps count from 1."""

    first: int
    last: int
    next_batch: int
    """The batch after the last bad one in the sample order, counted from 0."""


class SpikeDetector:
    """Detects loss spikes from the losses alone, so identically in every layout.

    A loss is a spike when it lies more than `threshold` deviations above the median of the last
    `window` good ones. The deviation is 1.4826 times the median distance from that median, which a
    few odd losses do not move; it counts as at least a thousandth of the median.
    """

    def __init__(self, threshold: float, window: int, history: LossHistory) -> None:
        """Go on from a history; `threshold` 0: no finite loss is a spike."""
        self.threshold, self.window = threshold, window
        self._recent = deque(history.recent, maxlen=window)
        self._bad_since = history.bad_since

    @property
    def history(self) -> LossHistory:
        """What a checkpoint keeps, so that a resumed run judges alike."""
        return LossHistory(recent=tuple(self._recent), bad_since=self._bad_since)

    def is_spike(self, loss: float) -> bool:
        """Compare a loss with those before it; until there are enough of them none is a spike."""
        if not math.isfinite(loss):
            return True
        if not self.threshold or len(self._recent) < self.window:
            return False
        median = statistics.median(self._recent)
        distance = statistics.median(abs(one - median) for one in self._recent)
        deviation = max(_DEVIATION * distance, _LEAST_SHARE * abs(median))
        return loss > median + self.threshold * deviation

    def take(self, step: int, loss: float, *, is_bad: bool) -> int:
        """Remember a step; return how many bad ones in a row end with it."""
        if not is_bad:
            self._recent.append(loss)
            self._bad_since = None
            return 0
        self._bad_since = self._bad_since or step
        return step - self._bad_since + 1


class WatchBadSteps:
    """A hook that names bad steps and counts them in the metrics.

    Attributes:
        judge: what it knows of the losses.
        row: the bad steps for which training is to go back or end; None so far.
    """

    def __init__(
        self,
        settings: TrainingConfig,
        saving: CheckpointConfig,
        *,
        history: LossHistory,
        batches_skipped: int,
    ) -> None:
        """Prepare; every process calls this.

        Args:
            settings: what is bad, and how many in a row are too many.
            saving: says when a checkpoint is due, which must know of all steps before it.
            history: of the checkpoint that the run goes on from.
            batches_skipped: likewise; the positions of a step's images follow.
        """
        self.settings, self.saving, self.batches_skipped = settings, saving, batches_skipped
        self.judge = SpikeDetector(settings.spike_threshold, settings.spike_window, history)
        self.row: BadStepStreak | None = None
        self._means = DelayedMean()
        self._counts: Counter[str] = Counter()

    def __call__(self, state: StepState) -> None:
        """Look at the steps that are known by now; where a line or a checkpoint is due, at all."""
        if state.loss is None:
            return
        skipped = state.engine.last_step_was_skipped()
        values = torch.stack([state.loss.detach().float(), skipped])
        known = self._means.exchange(state.step, values)
        due = state.is_due(self.settings.log_every) or state.is_due(self.saving.every)
        if due or state.wants_checkpoint or state.is_last:
            known += self._means.settle()
        for step, (loss, was_skipped) in known:
            if self.row is None:
                self._look(state, step, loss, was_skipped=bool(was_skipped))
        if state.is_due(self.settings.log_every):
            state.record.update(self._counts)
            self._counts.clear()
        if self.row is not None:
            state.goes_back = True
            state.stop = "too many bad steps in a row"

    def _look(self, state: StepState, step: int, loss: float, *, was_skipped: bool) -> None:
        if was_skipped and self.settings.precision == "fp16":
            return  # its loss scale is found by skipping
        is_bad = was_skipped or self.judge.is_spike(loss)
        in_a_row = self.judge.take(step, loss, is_bad=is_bad)
        if not is_bad:
            return
        self._counts["steps_skipped" if was_skipped else "loss_spikes"] += 1
        if state.engine.context.is_main:
            what = "is skipped, its gradients are not finite"
            if not was_skipped:
                what = f"has a loss of {loss:.6g}, far above those before it"
            tqdm.write(f"WARNING: step {step} {what}; {self._where(step)}", file=sys.stderr)
        if in_a_row == self.settings.max_bad_steps:
            self.row = BadStepStreak(step - in_a_row + 1, step, step + self.batches_skipped)

    def _where(self, step: int) -> str:
        size = self.settings.batch_size
        first = (step - 1 + self.batches_skipped) * size
        return f"its images are at positions {first} to {first + size - 1} of the sample order"
