"""Time the forward passes of one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

_KEPT = 256


class ForwardClock:
    """Times this process's forward passes, including their wait for data.

    In plain data parallelism no process waits for another until gradients are reduced, so a slow
    process shows. On a GPU nothing synchronizes until the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the block."""
        began = self._now()
        yield
        self._spans.append((began, self._now()))

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> float:
        """Return the mean seconds per pass since the last call, 0 without any, and reset."""
        spans = list(self._spans)
        self._spans.clear()
        if not spans:
            return 0.0
        if not self._is_cuda:
            return fmean(end - began for began, end in spans)
        spans[-1][1].synchronize()
        return 1e-3 * fmean(began.elapsed_time(end) for began, end in spans)
