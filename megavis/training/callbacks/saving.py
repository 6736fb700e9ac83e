"""Asynchronous checkpoints during training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Thread

from tqdm import tqdm

from megavis.checkpoint.state.save import Snapshot
from megavis.config.schema import CheckpointConfig
from megavis.parallel.agreement import AsyncFlag
from megavis.training.callbacks.callback import StepState


class SaveCheckpoint:
    """Saves the checkpoints that are due, that a callback requests, and the last one.

    Training waits while weights and states are copied to host memory; a thread then writes them. A
    failed write is counted in `failures` and reported, and training continues, except at the end.
    Creation is collective over all processes.

    Args:
        saving: determines when a checkpoint is due.
        take: copies the state of the run after a step.
        published: called after a checkpoint is published.
    """

    def __init__(
        self,
        saving: CheckpointConfig,
        take: Callable[[StepState], Snapshot],
        *,
        published: Callable[[], None],
    ) -> None:
        self._saving, self._take, self._published = saving, take, published
        self.failures = 0
        self._agreement = AsyncFlag()
        self._snapshot: Snapshot | None = None
        self._writer: Thread | None = None
        self._stall = 0.0

    def __call__(self, state: StepState) -> None:
        """Save if due, and publish checkpoints that all processes have written."""
        began = time.perf_counter()
        due = state.needs_checkpoint(self._saving) and not state.goes_back
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
        """Record the wait for checkpoints since the last logged step; a callback."""
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
        except OSError as error:
            if required:
                raise
            self.failures += 1
            _warn(f"{error}; training continues, and the previous checkpoint is kept")
            return
        try:
            self._published()
        except OSError as error:
            # The checkpoint is saved, and this may have failed on one process alone.
            _warn(f"old checkpoints are not deleted: {error}")


def _warn(text: str) -> None:
    tqdm.write(f"WARNING: {text}", file=sys.stderr)
