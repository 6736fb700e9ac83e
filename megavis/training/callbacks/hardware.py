"""What limits a run on its hardware: memory, waiting for the device, a slow process."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from megavis.training.callbacks.callback import StepState


class WatchHardware:
    """Records what the run's hardware does, every N steps; a callback in front of the metrics.

    `memory_gb`: most that was allocated on the main process's GPU. `device_wait_s`: how long the
    host waited for it at this step; near 0, the GPU waits for the host. Of several processes
    without pipeline stages, `forward_s` is the mean of their forward passes, `slowest_forward_s`
    that of the slowest, and `slowest_rank` says which it is.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, state: StepState) -> None:
        """Record the numbers where they are due; every process calls this."""
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
