"""Record hardware limits of a run: memory, waiting for the device, slow processes."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from megavis.training.callbacks.callback import StepState


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
