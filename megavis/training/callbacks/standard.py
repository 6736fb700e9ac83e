"""The callbacks of a training run, in the order in which they are called.

Two of them stand here: checkpoints, which are written while training continues, and the report of
samples that could not be read. `ShardDataset` reads the next good sample in place of a bad one, so
that one broken image does not end a run of a month; the report keeps this from going unnoticed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tqdm import tqdm

from megavis.checkpoint.state.save import Snapshot
from megavis.data.loading.blended_dataset import Samples
from megavis.parallel.agreement import AsyncFlag
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.base import (
    Callback,
    CollectGarbage,
    LogMetrics,
    ShowProgress,
    StepState,
    Validate,
)
from megavis.training.callbacks.samples import SampleImages
from megavis.training.faults.interruption import StopOnSignal
from megavis.training.finetune import Finetuning
from megavis.training.metrics import MetricsWriter, read_metrics

if TYPE_CHECKING:
    from megavis.training.run import TrainingRun


def build_callbacks(
    run: TrainingRun,
    first_step: int,
    validate: Validate | None,
    interruption: StopOnSignal,
    save: SaveCheckpoint,
    extra: Sequence[Callback],
) -> list[Callback]:
    """Return the side jobs that a run's config asks for.

    Args:
        run: opened and checked.
        first_step: steps already taken.
        validate: measures on held-out images, if there are any.
        interruption: asks all to stop; what may ask for a checkpoint comes before the extra ones.
        save: is called by the loop itself, last; its waiting is recorded here.
        extra: others, called after those that decide whether a step is saved.
    """
    settings, paper = run.config.training, run.objective
    log = LogMetrics(
        settings.log_every,
        flops_per_image=paper.flops_per_image(),
        tokens_per_image=paper.backbone.num_tokens,
    )
    replaced = ReportReplacedSamples(settings.log_every, run.train_data, run.context)
    callbacks: list[Callback] = [log, save.record_stall, replaced]
    if validate is not None:
        callbacks.append(validate)
    if run.finetuning is not None:
        callbacks.append(run.finetuning.stopping)
    callbacks.append(interruption)
    if settings.sample_every:
        callbacks.append(
            SampleImages(
                run.folder,
                run.validation_data,
                objective=paper,
                every=settings.sample_every,
                num_images=settings.sample_images,
            )
        )
    callbacks += [*extra, CollectGarbage()]
    if run.context.is_main:
        callbacks.append(ShowProgress(first_step, settings.steps))
    return [*callbacks, log.restart_clock]


def make_up_for(
    validate: Validate,
    state: StepState,
    finetuning: Finetuning | None,
    metrics: MetricsWriter | None,
    run_folder: Path,
) -> None:
    """Make the validation that a signal broke off just before the run was saved.

    Every process calls this, with the state that was saved. So the metrics of a run that was
    interrupted are those of one that was not.
    """
    if not state.is_due(validate.every):
        return
    context = state.engine.context
    lines = read_metrics(run_folder)
    is_done = any("validation_loss" in line and line["step"] == state.step for line in lines)
    # The folder may look older on another node.
    if context.from_main(is_done):
        return
    validate(state)
    if finetuning is not None:
        finetuning.stopping(state)
    if metrics is not None and state.record:
        metrics.amend(state.step, state.record)


class SaveCheckpoint:
    """Saves a checkpoint every N steps, when a hook requests one, and at the end.

    Training waits while weights and states are copied to host memory; a thread then writes them. A
    failed write is reported and training continues, except at the end.

    Attributes:
        failures: checkpoints that could not be written.
    """

    def __init__(
        self,
        every: int,
        take: Callable[[StepState], Snapshot],
        *,
        published: Callable[[], None],
        also_at: Collection[int] = (),
    ) -> None:
        """Prepare; every process calls this.

        Args:
            every: steps between two checkpoints; 0: only on a callback's request, and at the end.
            take: copies the run as it is after a step.
            published: called when a checkpoint has appeared.
            also_at: steps at which one is saved whatever `every` says.
        """
        self.every, self._take, self._published = every, take, published
        self._also_at = frozenset(also_at)
        self.failures = 0
        self._agreement = AsyncFlag()
        self._snapshot: Snapshot | None = None
        self._writer: Thread | None = None
        self._stall = 0.0

    def __call__(self, state: StepState) -> None:
        """Save where it is due, and let appear what all processes have written."""
        began = time.perf_counter()
        due = state.is_due(self.every) or state.step in self._also_at
        due = due or state.wants_checkpoint or state.step == state.last_step
        due = due and not state.goes_back
        if due or state.is_last or self._all_have_written():
            self._publish(required=state.is_last and not due and not state.goes_back)
        if due:
            self._snapshot = self._take(state)
            self._writer = Thread(target=self._snapshot.write, name="checkpoint", daemon=True)
            self._writer.start()
            if state.is_last:
                self._publish(required=True)
        self._stall += time.perf_counter() - began

    def record_stall(self, state: StepState) -> None:
        """Put into a logged line how long training has waited for checkpoints since the last one.

        A hook.
        """
        if state.record and self._stall:
            state.record["save_stall_s"], self._stall = self._stall, 0.0
            if self.failures:
                state.record["checkpoints_not_saved"] = self.failures

    def _all_have_written(self) -> bool:
        if self._snapshot is None or self._writer is None:
            return False
        return self._agreement.exchange(self._writer.is_alive()) is False

    def _publish(self, *, required: bool) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None or self._writer is None:
            return
        self._writer.join()
        self._agreement.forget()
        try:
            snapshot.publish()
            self._published()
        except OSError as error:
            if required:
                raise
            self.failures += 1
            warning = f"WARNING: {error}; training continues, and the previous checkpoint stays"
            tqdm.write(warning, file=sys.stderr)


_MAX_NAMED = 20
"""Names that a process prints; further ones are only counted."""


class ReportReplacedSamples:
    """Name new ones on stderr and record `samples_replaced`, every N steps.

    Batches are read ahead, so that a sample may be named before the step that would have had it.
    """

    def __init__(self, every: int, data: Samples, context: ParallelContext) -> None:
        self.every, self.data, self.context = every, data, context
        # What the index shows, every process knows from the start.
        self._known = len(data.skipped_names)
        self._named: set[str] = set() if context.is_main else set(data.skipped_names)

    def __call__(self, state: StepState) -> None:
        """Every process takes part."""
        if not state.is_due(self.every):
            return
        names = self.data.skipped_names
        self._report([name for name in names if name not in self._named])
        met = torch.tensor(len(names) - self._known, device=self.context.device)
        dist.all_reduce(met, group=self.context.data.group)
        if total := self._known + int(met):
            state.record["samples_replaced"] = total

    def _report(self, names: list[str]) -> None:
        room = max(0, _MAX_NAMED - len(self._named))
        for name in names[:room]:
            tqdm.write(f"data: {name}; the next good sample is read in its place", sys.stderr)
        if 0 < room < len(names):
            tqdm.write("data: further samples are counted, not named", sys.stderr)
        self._named.update(names)
