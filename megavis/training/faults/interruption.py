"""Stop on a signal, limit restarts without progress, and survive a log that cannot be written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from megavis.config.errors import GivenUpError
from megavis.data.format.files import write_atomically
from megavis.parallel.agreement import AsyncFlag
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import StepState
from megavis.training.provenance import read_starts

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""SLURM sends one of the first two before it reclaims the nodes; Ctrl-C is the third."""
RECORD_NAME = "restarts.json"
COUNTED = "MEGAVIS_COUNTED"
"""Environment variable: a file to make once a start is counted in the run folder. Failures before
that are the launcher's to count."""


class Signals:
    """Records a signal in `received` instead of terminating; a context manager around the job.

    A second Ctrl-C interrupts at once. Exceeding the file size limit raises OSError.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}
        self._handlers: dict[signal.Signals, Any] = dict.fromkeys(SIGNALS, self._receive)
        # With SIGXFSZ ignored, a write over the limit raises an error, handled like a full disk.
        self._handlers[signal.SIGXFSZ] = signal.SIG_IGN

    def __enter__(self) -> Signals:
        # Python only handles signals in its main thread; a job in another thread leaves them to its
        # owner.
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, new) for one, new in self._handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def take_back(self) -> None:
        """Install the signal handlers again, replacing any others.

        When Triton first compiles, LLVM replaces most signal handlers without Python's knowledge:
        it drops SIGUSR1, and ends the process on SIGXFSZ.
        """
        for one in self._before:
            signal.signal(one, self._handlers[one])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            self._handlers[signal.SIGINT] = signal.default_int_handler
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not `sys.stderr`, which may be in the middle of writing.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")


class StopOnSignal:
    """End training after a step, with a checkpoint, once any process gets a signal.

    Created on every process. `has_stopped` is set once it has ended training early.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._agreement = AsyncFlag()
        self._agreed = False
        self.has_stopped = False

    def __call__(self, state: StepState) -> None:
        """Stop once all processes know of the signal."""
        self._signals.take_back()
        if not self._agreed:
            self._agreed = bool(self._agreement.exchange(self._signals.received))
        # Not at the last step, which is saved anyway: the run is then finished, not interrupted.
        if self._agreed and state.loss is not None and not state.is_last:
            state.wants_checkpoint = True
            state.stop = "stopped by a signal"
            self.has_stopped = True

    def is_urgent(self) -> bool:
        """Return whether to abort work that delays the next checkpoint; called on all processes."""
        self._signals.take_back()
        self._agreed = self._agreed or self._agreement.settle(self._signals.received)
        # Aborted work must be repeated, even if no step is left to take.
        self.has_stopped = self.has_stopped or self._agreed
        return self._agreed


def count_restart(run_folder: Path, first_step: int, limit: int, context: ParallelContext) -> None:
    """Count automatic starts in the run folder; others reset the count. Called on every process.

    The run's first start, which `record_start` has recorded, is no restart.

    Raises GivenUpError on every process after `limit` restarts from the checkpoint of `first_step`.
    """
    context.on_main(lambda: _count(run_folder / RECORD_NAME, first_step, limit))
    if context.is_main and COUNTED in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ[COUNTED]).touch()


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM, torchrun or the launch scripts restarted this job automatically."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "MEGAVIS_RESTART_COUNT")
    return any(int(environment.get(name) or 0) > 0 for name in counts)


def _count(record: Path, first_step: int, limit: int) -> None:
    # A job that has been restarted may start the next run of a sweep, or one that it had not begun.
    is_first = len(read_starts(record.parent)) == 1
    if is_first or not is_automatic(os.environ):
        # The cause of earlier failures may have been removed before a manual start.
        record.unlink(missing_ok=True)
        return
    restarts = 1 + _restarts_before(record, first_step)
    if restarts > limit:
        record.unlink(missing_ok=True)
        raise GivenUpError(
            f"{record.parent}: restarted {limit} times without a new checkpoint since step"
            f" {first_step} (training.max_restarts); check the log for the cause, then start"
            " it again"
        )
    content = {"step": first_step, "restarts": restarts}
    write_atomically(record, json.dumps(content).encode())


def _restarts_before(record: Path, first_step: int) -> int:
    """Return the count in a record of restarts from this step; 0 if there is none."""
    # A node that loses its power may leave an empty file, which must not end every restart.
    with contextlib.suppress(FileNotFoundError, ValueError):
        before = json.loads(record.read_bytes())
        if isinstance(before, dict) and before.get("step") == first_step:
            restarts = before.get("restarts")
            return restarts if isinstance(restarts, int) else 0
    return 0


class _Forgiving:
    """A text stream that drops text that cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def forgiving_messages() -> Iterator[None]:
    """Ignore errors of standard output and error within the block."""
    output: Any = _Forgiving(sys.stdout)
    log: Any = _Forgiving(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(log):
        yield
