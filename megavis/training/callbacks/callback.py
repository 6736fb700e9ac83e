"""Callbacks of the training loop: their interface, and the ones that every run has.

`ShardDataset` replaces an invalid sample by the next valid one, so that a damaged image does not
end a long run; `ReportReplacedSamples` makes this visible. `SaveCheckpoint` writes checkpoints
while the next steps run. Callbacks on held-out images are in `validation.py`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from threading import Thread
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megavis.checkpoint.state.save import Snapshot
from megavis.composition.trainable import Trainable
from megavis.config.schema import CheckpointConfig
from megavis.data.loading.blended_dataset import Samples
from megavis.model.flops import peak_flops
from megavis.parallel.agreement import AsyncFlag
from megavis.parallel.context import ParallelContext
from megavis.parallel.progress_bar import is_silent
from megavis.training.engine import Engine


@dataclass
class StepState:
    """State passed to callbacks after a step; `record` becomes the step's line of metrics."""

    step: int
    """Optimizer steps taken so far."""
    last_step: int
    loss: Tensor | None
    """Loss on the device; reading it synchronizes. None before the first step."""
    engine: Engine
    record: dict[str, float] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    wants_checkpoint: bool = False
    """Set by a callback, equally on every process, to save this step even if not due."""
    stop: str | None = None
    """Reason to end training now; set by a callback, equally on every process."""
    rolls_back: bool = False
    """Set by a callback with `stop`: the last steps are dropped, so this one is not saved."""
    renew: Callable[[], None] = lambda: None
    """Callbacks that do long work in parts call this for each part, so that the watchdog does not
    mistake them for a hang."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last step."""
        return self.step == self.last_step or self.stop is not None

    def is_due(self, every: int) -> bool:
        """Whether an action every `every` steps is due, also at the end; never if `every` is 0."""
        return bool(every) and (self.step % every == 0 or self.step == self.last_step)

    def needs_checkpoint(self, saving: CheckpointConfig) -> bool:
        """Whether this step is saved: one that is due, that a callback requests, or the last."""
        due = self.is_due(saving.every) or self.step in saving.keep_at
        return due or self.wants_checkpoint or self.step == self.last_step


class Callback(Protocol):
    """Called on every process after every step, and once before the first."""

    def __call__(self, state: StepState) -> None:
        """Handle a step; may add to its record."""


_VALIDATED = ("validation_loss", "validation_accuracy")
_OF_TRAINING = ("lr", "grad_norm", "samples_per_s")
_STEPS_PER_COLLECTION = 200
_RETRIES = 10
"""Attempts to save until the next step that is due."""
_MAX_NAMED = 20
"""Names printed per process; further ones are only counted."""


class LogMetrics:
    """Loss, learning rate, gradient norm and throughput, every N steps.

    Without `mfu` where the step's operations or the device's peak are not known.

    Args:
        stalled: returns the seconds spent so far waiting for checkpoints.
    """

    def __init__(self, objective: Trainable, stalled: Callable[[], float]) -> None:
        config = objective.config
        self.every, self.tokens = config.training.log_every, objective.backbone.num_tokens
        self._flops = objective.flops_per_image() if objective.counts_whole_step else None
        self._arithmetic = (config.training.precision, objective.fp8_share())
        self._stalled = stalled
        self._since: tuple[int, float] | None = None

    def __call__(self, state: StepState) -> None:
        """Record the step's metrics if due."""
        if state.loss is None or not state.is_due(self.every):
            return
        engine = state.engine
        state.record["loss"] = engine.mean_over_data(state.loss)
        # The rate of the step that was taken; rates count from 0.
        state.record["lr"] = engine.rate(state.step - 1)
        # Infinite if an fp16 step overflowed and was skipped.
        state.record["grad_norm"] = engine.gradient_norm()
        if (scale := engine.loss_scale()) is not None:
            state.record["loss_scale"] = scale.scale
        state.record["samples_seen"] = state.step * engine.config.training.batch_size
        state.record.update(self._throughput(state))

    def restart_clock(self, state: StepState) -> None:
        """Exclude what follows a step from throughput; called after all of it.

        The clock starts after the first step, which includes warm-up.
        """
        if state.loss is None:
            return
        if self._since is None and state.loss.is_cuda:
            # The host has only enqueued that step. Later, the loss has been read.
            torch.cuda.synchronize(state.loss.device)
        if self._since is None or state.record or state.images:
            self._since = (state.step, self._seconds_outside_saves())

    def _seconds_outside_saves(self) -> float:
        return time.perf_counter() - self._stalled()

    def _throughput(self, state: StepState) -> dict[str, float]:
        if self._since is None:
            return {}
        first_step, begin = self._since
        images = (state.step - first_step) * state.engine.config.training.batch_size
        rate = images / (self._seconds_outside_saves() - begin)
        speeds = {"samples_per_s": rate, "tokens_per_s": rate * self.tokens}
        context = state.engine.context
        if self._flops is not None and context.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(context.device), *self._arithmetic)
            if peak:
                speeds["mfu"] = rate * self._flops / (peak * context.world.size)
        return speeds


def collect_garbage(state: StepState) -> None:
    """Run Python's garbage collector every 200 steps, and automatically again after the last.

    Left to itself it pauses each process at a different time, and all others wait for it.
    """
    if state.is_due(_STEPS_PER_COLLECTION):
        gc.collect()
    # Not before the first call: a run that is finished takes no step, and none would enable it.
    if state.is_last:
        gc.enable()
    else:
        gc.disable()


class ShowProgress:
    """A progress bar on a terminal, plain lines in a log; only on the main process.

    On a terminal, training metrics follow the bar and overwrite each other; validation
    metrics get separate lines.
    """

    def __init__(self, first_step: int, last_step: int) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=is_silent(),
        )

    def __call__(self, state: StepState) -> None:
        """Advance the bar; show the step's metrics if there are any."""
        if state.loss is not None:
            self._bar.update(1)
        if self._on_terminal and "loss" in state.record:
            self._bar.set_postfix_str(f"loss {state.record['loss']:.4g}", refresh=False)
        names = _VALIDATED if self._on_terminal else ("loss", *_VALIDATED, *_OF_TRAINING)
        text = "  ".join(f"{k} {state.record[k]:.4g}" for k in names if k in state.record)
        if text:
            tqdm.write(f"step {state.step}/{state.last_step}  {text}", file=sys.stderr)
        if state.is_last:
            self._bar.close()


class ReportReplacedSamples:
    """Report replaced samples on stderr and record `samples_replaced`, every N steps.

    Batches are prefetched, so a sample may be reported before the step that would have used it.
    """

    def __init__(self, every: int, data: Samples, context: ParallelContext) -> None:
        self.every, self.data, self.context = every, data, context
        # Samples of wrong length are known on every process from the start.
        self._known = len(data.skipped_names)
        self._named: set[str] = set() if context.is_main else set(data.skipped_names)
        self._room = _MAX_NAMED

    def __call__(self, state: StepState) -> None:
        """Report if due. Collective over all processes."""
        if not state.is_due(self.every):
            return
        names = self.data.skipped_names
        self._report([name for name in names if name not in self._named])
        met = torch.tensor(len(names) - self._known, device=self.context.device)
        dist.all_reduce(met, group=self.context.data.group)
        if total := self._known + int(met):
            state.record["samples_replaced"] = total

    def _report(self, names: list[str]) -> None:
        for name in names[: max(0, self._room)]:
            tqdm.write(f"data: {name}; replaced by the next valid sample", sys.stderr)
        if 0 <= self._room < len(names):
            tqdm.write("data: further replaced samples are counted, not named", sys.stderr)
        # Below 0 once that is said.
        self._room -= len(names)
        self._named.update(names)


class WatchHardware:
    """Records hardware metrics every N steps; a callback to run before `LogMetrics`.

    `memory_gb`: peak memory allocated on the main process's GPU. `device_wait_s`: time the host
    waited for it at this step; if near 0, the GPU waits for the host. With several processes and
    no pipeline stages, `forward_s` is the mean time of their forward passes, `slowest_forward_s`
    the slowest process's, and `slowest_rank` its rank.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, state: StepState) -> None:
        """Record the metrics if due. Collective over all processes."""
        if state.loss is None or not state.is_due(self.every):
            return
        device = state.engine.context.device
        if device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize(device)
            state.record["device_wait_s"] = time.perf_counter() - began
            state.record["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        mine = state.engine.forward_clock.read()
        context = state.engine.context
        if mine and context.world.size > 1:
            seconds = context.gather(mine)
            state.record["forward_s"] = fmean(seconds)
            state.record["slowest_forward_s"] = max(seconds)
            state.record["slowest_rank"] = seconds.index(max(seconds))


class SaveCheckpoint:
    """Saves the checkpoints that are due, that a callback requests, and the last one.

    Training waits while weights and states are copied to host memory; a thread then writes them. A
    failed write is counted in `failures` and reported, and training continues, except at the end; a
    tenth of `checkpoint.every` later, a newer step is saved instead. `stalled` are the seconds in
    which neither host nor device trained. Creation is collective over all processes.

    Args:
        saving: determines when a checkpoint is due.
        take: copies the state of the run after a step.
        published: called after a checkpoint is published.
        prepare: called after the first step, ahead of the first copy unless that is due.
    """

    def __init__(
        self,
        saving: CheckpointConfig,
        take: Callable[[StepState], Snapshot],
        *,
        published: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._saving, self._take, self._published = saving, take, published
        self._prepare, self._is_prepared = prepare, False
        self.failures = 0
        self._agreement = AsyncFlag()
        self._snapshot: Snapshot | None = None
        self._writer: Thread | None = None
        self._retry_at: int | None = None
        self.stalled = self._unrecorded = 0.0

    def request_retry(self, state: StepState) -> None:
        """Request a checkpoint in place of one that could not be written; a callback."""
        state.wants_checkpoint |= state.step == self._retry_at

    def __call__(self, state: StepState) -> None:
        """Save if due, and publish checkpoints that all processes have written."""
        due = state.needs_checkpoint(self._saving) and not state.rolls_back
        if due and torch.cuda.is_initialized():
            # The copies wait for the step in any case; that time is the step's.
            torch.cuda.synchronize()
        began = time.perf_counter()
        # Publish the previous snapshot first: the next one is copied into the same memory.
        if due or state.is_last or self._all_have_written():
            self._publish(state, required=state.is_last and not due and not state.rolls_back)
        if due:
            self._snapshot = self._take(state)
            self._writer = Thread(target=self._snapshot.write, name="checkpoint", daemon=True)
            self._writer.start()
            if state.is_last:
                self._publish(state, required=True)
        # After the first step, when the optimizer has the states whose sizes are needed.
        if not self._is_prepared:
            self._is_prepared = True
            self._prepare()
        taken = time.perf_counter() - began
        self._unrecorded += taken
        # A GPU computes the step while the host publishes an earlier checkpoint.
        self.stalled += taken if due or not torch.cuda.is_initialized() else 0.0

    def record_stall(self, state: StepState) -> None:
        """Record the wait for checkpoints since the last logged step; a callback."""
        if state.record and self._unrecorded:
            state.record["save_stall_s"], self._unrecorded = self._unrecorded, 0.0
            if self.failures:
                state.record["checkpoints_not_saved"] = self.failures

    def _all_have_written(self) -> bool:
        if self._snapshot is None or self._writer is None:
            return False
        return self._agreement.exchange(self._writer.is_alive()) is False

    def _publish(self, state: StepState, *, required: bool) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None or self._writer is None:
            return
        self._writer.join()
        # A pending exchange is about this snapshot and would be mistaken for the next one's.
        self._agreement.forget()
        try:
            snapshot.publish()
        except OSError as error:
            if required:
                raise
            self.failures += 1
            # A network disk may be back in minutes, and the next step that is due hours away. With
            # few steps between, that one is soon enough.
            if self._saving.every >= _RETRIES:
                self._retry_at = state.step + self._saving.every // _RETRIES
            text = f"{error}; training continues, and the previous checkpoint is kept"
            tqdm.write(f"WARNING: {text}", file=sys.stderr)
            return
        try:
            self._published()
        except OSError as error:
            # The checkpoint is saved, and this may have failed on one process alone.
            tqdm.write(f"WARNING: old checkpoints are not deleted: {error}", file=sys.stderr)
