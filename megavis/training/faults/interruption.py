"""On a signal: checkpoint and exit with 75."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from megavis.parallel.agreement import AsyncFlag
from megavis.training.callbacks.base import StepState

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SLURM sends either of them before it takes the nodes away."""


class Signals:
    """Notes either signal instead of dying of it; a context manager around the whole job.

    Attributes:
        received: True once this process has got one.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        # Python lets no other thread handle signals; a job in one is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._receive) for one in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class StopOnSignal:
    """A hook that ends training after a step, with a checkpoint, once any process gets a signal.

    Attributes:
        has_stopped: True once it has ended training before all was done.
    """

    def __init__(self, signals: Signals) -> None:
        """Join the other processes; every process calls this."""
        self._signals = signals
        self._agreement = AsyncFlag()
        self._agreed = False
        self.has_stopped = False

    def __call__(self, state: StepState) -> None:
        """Stop where all know that one was asked to."""
        if not self._agreed:
            self._agreed = bool(self._agreement.exchange(self._signals.received))
        if self._agreed and state.loss is not None and not state.is_last:
            state.wants_checkpoint = True
            state.stop = "asked to stop by a signal"
            self.has_stopped = True

    def is_urgent(self) -> bool:
        """Say whether to break off what delays the next checkpoint; all processes ask together."""
        self._agreed = self._agreed or self._agreement.settle(self._signals.received)
        # What is broken off is to be made up for, also where no step is left to take.
        self.has_stopped = self.has_stopped or self._agreed
        return self._agreed
