"""Callbacks for metrics, hardware, progress and replaced samples, and for garbage collection.

`ShardDataset` replaces an invalid sample by the next valid one, so that a damaged image does not
end a long run; `ReportReplacedSamples` makes this visible.
"""

from __future__ import annotations

import gc
import sys
import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from megavis.data.loading.blended_dataset import Samples
from megavis.model.flops import peak_flops
from megavis.parallel.context import ParallelContext
from megavis.parallel.progress_bar import is_silent
from megavis.training.callbacks.callback import StepState

_VALIDATED = ("validation_loss", "validation_accuracy")
_OF_TRAINING = ("lr", "grad_norm", "samples_per_s")
_STEPS_PER_COLLECTION = 200
_MAX_NAMED = 20
"""Names printed per process; further ones are only counted."""


class LogMetrics:
    """Loss, learning rate, gradient norm and throughput, every N steps."""

    def __init__(
        self, every: int, *, flops_per_image: float, fp8_share: float, tokens_per_image: int
    ) -> None:
        self.every, self.flops, self.tokens = every, flops_per_image, tokens_per_image
        self.fp8_share = fp8_share
        self._since: tuple[int, float] | None = None

    def __call__(self, state: StepState) -> None:
        """Record the step's metrics if due."""
        if state.loss is None or not state.is_due(self.every):
            return
        engine = state.engine
        state.record["loss"] = engine.mean_over_data(state.loss)
        state.record["lr"] = engine.rate(state.step - 1)
        # Infinite if an fp16 step overflowed and was skipped.
        state.record["grad_norm"] = engine.gradient_norm()
        if (scale := engine.loss_scale()) is not None:
            state.record["loss_scale"] = scale.scale
        state.record["samples_seen"] = state.step * engine.config.training.batch_size
        state.record.update(self._throughput(state))

    def restart_clock(self, state: StepState) -> None:
        """Exclude the time of other callbacks from throughput; called after them.

        The clock starts after the first step, which includes warm-up.
        """
        began = state.loss is not None
        if began and (self._since is None or state.record or state.images):
            self._since = (state.step, time.perf_counter())

    def _throughput(self, state: StepState) -> dict[str, float]:
        if self._since is None:
            return {}
        first_step, begin = self._since
        images = (state.step - first_step) * state.engine.config.training.batch_size
        rate = images / (time.perf_counter() - begin)
        speeds = {"samples_per_s": rate, "tokens_per_s": rate * self.tokens}
        context = state.engine.context
        if context.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(context.device), self.fp8_share)
            if peak:
                speeds["mfu"] = rate * self.flops / (peak * context.world.size)
        return speeds


class CollectGarbage:
    """Run Python's garbage collector every 200 steps.

    Otherwise it pauses each process at a different time, and all others wait for it.
    """

    def __init__(self) -> None:
        gc.disable()

    def __call__(self, state: StepState) -> None:
        """Collect if due; at the end, restore Python's automatic collection."""
        if state.is_due(_STEPS_PER_COLLECTION):
            gc.collect()
        if state.is_last:
            gc.enable()


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
        room = max(0, _MAX_NAMED - len(self._named))
        for name in names[:room]:
            tqdm.write(f"data: {name}; replaced by the next valid sample", sys.stderr)
        if 0 < room < len(names):
            tqdm.write("data: further replaced samples are counted, not named", sys.stderr)
        self._named.update(names)


class WatchHardware:
    """Records hardware metrics every N steps; a callback to run before `LogMetrics`.

    `memory_gb`: peak memory allocated on the main process's GPU. `device_wait_s`: time the host
    waited for it at this step; if near 0, the GPU waits for the host. With several processes and
    no pipeline stages, `forward_s` is the mean time of their forward passes, `slowest_forward_s`
    that of the slowest, and `slowest_rank` its rank.
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
        world = state.engine.context.world
        if mine and world.size > 1:
            seconds: list[Any] = [None] * world.size
            dist.all_gather_object(seconds, mine)
            state.record["forward_s"] = fmean(seconds)
            state.record["slowest_forward_s"] = max(seconds)
            state.record["slowest_rank"] = seconds.index(max(seconds))
