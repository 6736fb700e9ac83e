"""TensorBoard event files, written without a thread.

TensorBoard's own writer starts a thread that dies on the first disk error, which loses all later
events; the thread also outlives an error or signal while the writer opens. Here, events that cannot
be written wait in memory for the next attempt.
"""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.data.format.files import append, make_within

if TYPE_CHECKING:
    import numpy as np

_MOST_PENDING = 1 << 28
"""Largest size in bytes of the events that wait for a disk."""


class EventFile:
    """A new event file of a run, whose TensorBoard folder is created with the first event.

    Args:
        run_folder: folder of the run, which must exist.
        within: name of a folder in the TensorBoard folder; by default the latter itself.
        suffix: appended to the file's name.
    """

    def __init__(self, run_folder: Path, *, within: str = "", suffix: str = "") -> None:
        self._proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._records = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._summary = importlib.import_module("torch.utils.tensorboard.summary")
        self._run_folder, self._within = run_folder, ["tensorboard", *filter(None, [within])]
        # TensorBoard orders the files of a run by name.
        unique = f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}{suffix}"
        self._path = (
            run_folder.joinpath(*self._within)
            / f"events.out.tfevents.{int(time.time()):010d}.{unique}"
        )
        self._pending: list[bytes] = []
        self._size = 0
        self._add(file_version="brain.Event:2")

    def start_at(self, step: int) -> None:
        """Make TensorBoard discard events of earlier files from this step on."""
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._add(step, session_log=start)

    def add_scalar(self, step: int, name: str, value: float) -> None:
        """Add a number, which `write` writes."""
        self._add(step, summary=self._summary.scalar(name, value))

    def add_image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Add uint8 pixels `[h, w, 3]`, which `write` writes."""
        self._add(step, summary=self._summary.image(name, pixels, dataformats="HWC"))

    def write(self) -> None:
        """Append the pending events; the oldest are dropped if there are too many.

        Raises:
            OSError: they cannot be written, and wait for the next call.
        """
        while sum(map(len, self._pending)) > _MOST_PENDING and len(self._pending) > 2:
            # Keep the first two, without which it is not an event file.
            del self._pending[0 if self._size else 2]
        make_within(self._run_folder, *self._within)
        self._size = append(self._path, b"".join(self._pending), size=self._size)
        self._pending.clear()

    def _add(self, step: int = 0, **content: Any) -> None:
        event = self._proto.Event(wall_time=time.time(), step=step, **content)
        record = io.BytesIO()
        self._records.RecordWriter(record).write(event.SerializeToString())
        self._pending.append(record.getvalue())
