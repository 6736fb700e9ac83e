"""Detect a process that hangs or has died, report it, and end the job.

The other processes are then blocked in a collective, so each process runs a thread that writes a
heartbeat to a store, and one that watches the time; a process whose heartbeat stops is reported.
Rank 0 hosts the store: if it hangs, requests never return, so no thread waits for a reply.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megavis.data.format.files import make_within, write_atomically
from megavis.parallel.context import MEETING_SECONDS, ParallelContext, set_timeouts

HUNG_EXIT_CODE = 70
"""Exit code of a process that ended itself because the job hangs; EX_SOFTWARE in sysexits.h."""

LONGEST_WINDOW = 10
"""Multiple of the patience for the first step and for each part of the work between steps."""

_BEAT_SECONDS = 1.0
_SILENT_BEATS = 4
_REPORT_SECONDS = 3 * _SILENT_BEATS * _BEAT_SECONDS
_LINGER_BEATS = _SILENT_BEATS + 2
_ASKING = 4
"""How many of the first ranks ask for heartbeats, and how many spread over the others."""
_WRITE_SECONDS = 5.0
_MOST_SECONDS = 2 * (_REPORT_SECONDS + _WRITE_SECONDS)
_A_MONTH = 30 * 24 * 3600.0


class Watchdog:
    """Ends the job if something takes too long; a context manager around training.

    Args:
        patience: seconds that a step may take; 0: no limit. A single process is not watched.
        stacks: folder for the stacks of each process when the job hangs, in an existing one; by
            default they are written to standard error.
    """

    def __init__(
        self, context: ParallelContext, *, patience: float, stacks: Path | None = None
    ) -> None:
        self._stacks = stacks
        self._rank, self._size = context.world.rank, context.world.size
        self._patience = patience if self._size > 1 else 0.0
        self._doing = "starting"
        self._window = self._deadline = float("inf")
        self._over = threading.Event()
        self._thread = _background(self._watch)

    def __enter__(self) -> Watchdog:
        # Set timeouts now that DeepSpeed and the callbacks have created their groups, which have
        # torch's timeout.
        set_timeouts(collective_timeout(self._patience))
        if self._patience:
            self._store = _join_store()
            self._send_heartbeat()
            # Two threads: a process that waits in a collective, or for the store, is still alive.
            _background(self._beat).start()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop watching; if training has failed, report unresponsive ranks."""
        if not self._patience:
            return
        self._deadline = float("inf")
        if isinstance(error, Exception):
            self._report_silent_ranks()
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def expect(self, doing: str, *, times: int = 1) -> Iterator[None]:
        """Watch the block, which may take `times` the patience."""
        self._doing, self._window = doing, times * self._patience
        self.renew()
        yield
        self._window = self._deadline = float("inf")

    def renew(self) -> None:
        """Begin the window of `expect` again: a part of what it watches is done."""
        self._deadline = time.monotonic() + self._window

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            self._send_heartbeat()

    def _watch(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            if time.monotonic() > self._deadline:
                self._end()

    def _send_heartbeat(self) -> None:
        word = {"host": socket.gethostname(), "doing": self._doing, "time": time.time_ns()}
        # The store dies with its host; processes that can still report do so.
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(self._rank), json.dumps(word))

    def _end(self) -> NoReturn:
        text = (
            f"rank {self._rank} on {socket.gethostname()} has waited for {self._patience:g} s or"
            f" more in {self._doing}"
        )
        # Without the GIL, which a stuck driver may keep from here on.
        faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
        # First: how long writing takes differs between ranks, and one that has ended is silent.
        self._report_silent_ranks()
        asks = _asks(self._rank, self._size)
        if not self._write_stacks(text):
            sys.stderr.write(f"megavis: {text}; its stacks:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
        elif asks:
            sys.stderr.write(
                f"megavis: {text}; the stacks of each rank N: {self._stacks}/rank-N.txt\n"
            )
        sys.stderr.flush()
        if not asks:
            # Those that ask must not find this process silent.
            time.sleep(_LINGER_BEATS * _BEAT_SECONDS)
        elif self._rank == 0:
            # The store ends with this process, and others may have begun to ask a little later.
            time.sleep((_LINGER_BEATS - _SILENT_BEATS) * _BEAT_SECONDS)
        if self._stacks is not None:
            _background(partial(_write_collectives, self._stacks, self._rank)).start()
            time.sleep(_BEAT_SECONDS)
        # `sys.exit` would end only this thread, and an orderly exit waits for threads that hang.
        os._exit(HUNG_EXIT_CODE)

    def _write_stacks(self, text: str) -> bool:
        """Write the stacks of all threads to this rank's file; return whether it could be written.

        The lines that faulthandler writes do not name the rank, so that in a log of many processes
        nobody could tell whose they are.
        """
        if (folder := self._stacks) is None:
            return False
        written: list[Path] = []

        def write() -> None:
            with contextlib.suppress(OSError):
                make_within(folder.parent, folder.name)
                with (folder / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
                    now = datetime.now(UTC).isoformat(timespec="seconds")
                    file.write(f"{now} {text}\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                written.append(folder)

        writing = _background(write)
        writing.start()
        # The disk may be what hangs.
        writing.join(_WRITE_SECONDS)
        return bool(written)

    def _report_silent_ranks(self) -> None:
        """Report the ranks whose heartbeat has stopped; the first live rank that asks does this."""
        if not _asks(self._rank, self._size):
            return
        found: list[dict[int, str]] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(self._silent_ranks())

        asking = _background(ask)
        asking.start()
        asking.join(_REPORT_SECONDS)
        if not found:
            sys.stderr.write(
                f"megavis: rank 0 on {os.environ['MASTER_ADDR']}, which hosts the rendezvous, does"
                f" not answer: it is dead or hangs; rank {self._rank} was in {self._doing}\n"
            )
            return
        silent = found[0]
        living = [r for r in range(self._size) if r not in silent and _asks(r, self._size)]
        if silent and living[:1] == [self._rank]:
            sys.stderr.write("".join(f"megavis: {text}\n" for text in silent.values()))
            sys.stderr.flush()

    def _silent_ranks(self) -> dict[int, str]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        before = self._words(others)
        for _ in range(_SILENT_BEATS):
            # Other processes check too, so keep sending heartbeats.
            self._send_heartbeat()
            time.sleep(_BEAT_SECONDS)
        after, silent = self._words(others), {}
        for rank in others:
            word = after.get(rank)
            if word == before.get(rank):
                last = json.loads(word) if word else {"host": "an unknown host", "doing": "start"}
                silent[rank] = (
                    f"rank {rank} on {last['host']} does not answer: it is dead or hangs; last"
                    f" heard of in {last['doing']}"
                )
        return silent

    def _words(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the last heartbeat of each rank that has sent one.

        In one request for all: rank 0 answers one at a time, and thousands of requests would make
        it look silent.
        """
        known = self._heard_of(ranks)
        # Asked for a key that is missing, the store would wait for it.
        values = self._store.multi_get([_key(rank) for rank in known]) if known else []
        return dict(zip(known, values, strict=True))

    def _heard_of(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks that have sent a heartbeat."""
        if not ranks or self._store.check([_key(rank) for rank in ranks]):
            return [*ranks]
        if len(ranks) == 1:
            return []
        middle = len(ranks) // 2
        return self._heard_of(ranks[:middle]) + self._heard_of(ranks[middle:])


def _write_collectives(folder: Path, rank: int) -> None:
    """Write the last collectives that NCCL's flight recorder has kept, for `torchfrtrace`.

    torch would do so when a collective times out, but the watchdog ends the process before. Last of
    all, since it keeps the GIL and asks the driver, which may hang too.
    """
    # torch without CUDA has neither NCCL nor this function. Without a buffer it has kept nothing.
    if dist.is_initialized() and dist.get_backend() == "nccl":
        from torch._C import _distributed_c10d

        trace = _distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
        write_atomically(folder / f"collectives_rank_{rank}", trace)


def _asks(rank: int, size: int) -> bool:
    """Return whether a rank asks for the heartbeats of all: a few do, on different nodes."""
    return rank < _ASKING or rank % -(-size // _ASKING) == 0 or rank == size - 1


def collective_timeout(patience: float) -> float:
    """Return how many seconds a collective may wait: longer than any watched window.

    The watchdog then names a hanging process before NCCL ends any process. Without a limit
    (`patience` 0) it is a month.
    """
    if not patience:
        return _A_MONTH
    return max(MEETING_SECONDS, LONGEST_WINDOW * patience + 60.0)


def _background(job: Callable[[], object]) -> threading.Thread:
    return threading.Thread(target=job, name="watchdog", daemon=True)


def _key(rank: int) -> str:
    return f"megavis/alive/{rank}"


def _join_store() -> dist.TCPStore:
    """Open another connection to the rendezvous store: the first may be blocked."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )
