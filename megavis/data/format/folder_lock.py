"""Lock a folder: one job at a time trains in a run folder, or writes to a shard folder.

The first rank keeps a file `.lock-N` there, which names its process, and renews its modification
time every few seconds. To take over, a process creates the file with the next number, which only
one can do, even on network disks; neither `flock` nor synchronized clocks are needed. On the
holder's own host, a lock whose process has ended is taken over at once. From another host, the file
is watched, and a holder that does not renew it for `SILENCE_SECONDS` is considered dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from megavis.config.errors import GIVEN_UP_EXIT_CODE, UserError

BEAT_SECONDS = 5.0
"""Interval of heartbeats."""
SILENCE_SECONDS = 60.0
"""Silence after which a holder on another host is dead; file attributes may be cached as long."""
LONG_DEAD_SECONDS = 1800.0
"""A lock this much older than a new file is not watched; clocks of two hosts differ by less."""
GONE_EXIT_CODE = 1
"""Exit code of a holder whose folder is gone: as for any failure of a disk, launchers retry."""

_PREFIX = ".lock-"
_LOOK_SECONDS = 0.5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderLock:
    """The lock of a folder, which is created if missing, for one process; a context manager.

    Args:
        folder: the folder.
        patience: seconds to wait for a live holder to finish.
        name: name of one of several locks in the folder, which do not exclude each other; without
            slashes.
        use: how holders use the folder, for messages.
    """

    def __init__(
        self, folder: Path, *, patience: float = 0.0, name: str = "", use: LockUse | None = None
    ) -> None:
        self._folder, self._patience = folder, patience
        self._prefix, self._use = lock_prefix(name), use or TRAINING
        self._holder = Holder.of_this_process()
        self._path = folder
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="folder-lock", daemon=True)

    def __enter__(self) -> FolderLock:
        """Take the lock. Raises UserError if it is held, or the folder cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take(time.monotonic() + self._patience)
        except OSError as error:
            reason = error.strerror or str(error)
            what = self._use.folder
            raise UserError(f"{self._folder}: the {what} cannot be written: {reason}") from None
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._over.set()
        self._beats.join()
        # If the disk fails and the file stays, the lock is taken over like any ended process's.
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink(missing_ok=True)

    def _take(self, deadline: float) -> None:
        """Become the holder with the highest number, once all others are dead."""
        while not self._try(deadline):
            # A random pause: two processes that gave way to each other would collide again.
            time.sleep(secrets.SystemRandom().uniform(0.0, _LOOK_SECONDS))

    def _try(self, deadline: float) -> bool:
        """Try to take the lock once; return False if another holder came or went meanwhile."""
        dead = _locks(self._folder, self._prefix)
        for path, holder in dead.items():
            if _is_dead(path, holder):
                continue
            if holder is None or time.monotonic() < deadline:
                return False
            raise self._use.refusal(self._folder, holder)
        self._path = self._folder / f"{self._prefix}{1 + max(map(_number, dead), default=0)}"
        if not _create(self._path, self._holder):
            return False
        others = _locks(self._folder, self._prefix)
        others = {path: holder for path, holder in others.items() if path != self._path}
        # Another process came between the two listings: give way and try again.
        if any(path not in dead or dead[path] != holder for path, holder in others.items()):
            self._path.unlink(missing_ok=True)
            return False
        for path in others:
            path.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        """Renew the heartbeat; end this process if another job has taken over."""
        last_seen = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            # Do not stop if the disk is briefly unavailable. It then reports an error, or, where
            # its mount is lost, the folder or the file is gone.
            with contextlib.suppress(OSError):
                if self._is_mine():
                    last_seen = time.monotonic()
                    os.utime(self._path)
                elif self._over.is_set():
                    return
                elif self._successors():
                    self._leave()
                elif time.monotonic() > last_seen + SILENCE_SECONDS:
                    self._give_up()

    def _is_mine(self) -> bool:
        return _read(self._path) == self._holder

    def _successors(self) -> list[Holder]:
        """Return the other holders of this lock; none if the folder is gone."""
        with contextlib.suppress(FileNotFoundError):
            locks = _locks(self._folder, self._prefix).values()
            return [each for each in locks if each is not None and each != self._holder]
        return []

    def _leave(self) -> None:
        """Exit immediately: another process writes to the folder, which a requeue would disturb."""
        holders = ", ".join(map(str, self._successors()))
        _end_process(
            f"{self._folder}: the lock of this job is gone, taken over by {holders};"
            f" {self._use.end}",
            GIVEN_UP_EXIT_CODE,
        )

    def _give_up(self) -> None:
        """Exit as after an OSError: the disk is not there, or the lock was deleted by hand."""
        _end_process(
            f"{self._path}: missing for {SILENCE_SECONDS:g} s on {socket.gethostname()}, so its"
            f" disk is not mounted any more or it was deleted; {self._use.end}",
            GONE_EXIT_CODE,
        )


def _end_process(text: str, code: int) -> NoReturn:
    try:
        sys.stderr.write(f"error: {text}\n")
        sys.stderr.flush()
    finally:  # also where the disk of the log is full
        # `sys.exit` would end only this thread.
        os._exit(code)


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        host: name of its host.
        machine: boot, process namespace and user; if they agree, the process can be looked up.
        process: process id.
        started: clock ticks from boot to its start, which distinguishes reused ids.
        since: when it took the lock, ISO 8601.
        token: random, unique to this holder.
    """

    host: str
    machine: str
    process: int
    started: int
    since: str
    token: str

    @classmethod
    def of_this_process(cls) -> Holder:
        """Describe this process."""
        process = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        started = _start_of(process) or 0
        return cls(socket.gethostname(), _machine(), process, started, since, secrets.token_hex(8))

    @property
    def is_here(self) -> bool:
        """Whether its process can be looked up here."""
        return (self.host, self.machine) == (socket.gethostname(), _machine())

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended; valid only if `is_here`."""
        return _start_of(self.process) != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"


@dataclass(frozen=True)
class LockUse:
    """The use of a lock, for messages.

    Attributes:
        folder: description of the folder.
        words: description of the other job's work.
        advice: how to work elsewhere.
        end: what happens to a job that has lost its lock.
    """

    folder: str
    words: str
    advice: str
    end: str = "this job ends"

    def refusal(self, folder: Path, holder: Holder) -> UserError:
        """Return the error for a second job."""
        return UserError(
            f"{folder}: {self.words} ({holder}); wait until it has ended, stop it, or {self.advice}"
        )


TRAINING = LockUse(
    "run folder",
    "another job trains in this run folder",
    "give this run another name (name=...)",
    "this job ends without saving",
)


def lock_prefix(name: str) -> str:
    """Return the prefix of a lock's files; a number follows."""
    return f"{_PREFIX}{name}-" if name else _PREFIX


def holder_of(folder: Path, name: str = "") -> Holder | None:
    """Return the live holder of a folder's lock, if there is one.

    On another host, a holder that was silent for `SILENCE_SECONDS` by the disk's clock counts as
    dead; by this host's, which may differ, if the folder cannot be written.
    """
    locks = _locks(folder, lock_prefix(name))
    if not locks:
        return None
    path = max(locks, key=_number)
    holder = locks[path]
    if holder is None or (holder.is_here and holder.has_ended):
        return None
    if holder.is_here:
        return holder
    try:
        silence = _age(path)
    except OSError:
        silence = time.time() - (_modified(path) or 0) / 1e9
    return holder if silence < SILENCE_SECONDS else None


def _is_dead(path: Path, holder: Holder | None) -> bool:
    """Return whether a holder has ended; on another host this may take a minute.

    `holder` is None if the file is incomplete: being written, or never finished.
    """
    if holder is not None and holder.is_here:
        return holder.has_ended
    first = _modified(path)
    if first is None or _age(path) > LONG_DEAD_SECONDS:
        return True
    begin, has_said = time.monotonic(), False
    while _modified(path) == first and _read(path) == holder:
        if time.monotonic() > begin + SILENCE_SECONDS:
            return True
        time.sleep(_LOOK_SECONDS)
        if not has_said:
            _print_waiting(path, holder)
            has_said = True
    return False


def _print_waiting(path: Path, holder: Holder | None) -> None:
    sys.stderr.write(
        f"{path.parent}: held by {holder or 'an unknown process'}; waiting up to"
        f" {SILENCE_SECONDS:g} s for a sign of life\n"
    )
    sys.stderr.flush()


def _modified(path: Path) -> int | None:
    """Return the modification time of a file in ns; None if it is gone."""
    try:
        # Opening a file queries a network disk; a stat may be answered from the host's cache.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _age(path: Path) -> float:
    """Return the age of a file in seconds, by the disk's clock."""
    probe = path.with_name(f".clock-{secrets.token_hex(8)}")
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime - (_modified(path) or 0) / 1e9
    finally:
        probe.unlink(missing_ok=True)


def _create(path: Path, holder: Holder) -> bool:
    """Create a file with its content; return whether it did not exist."""
    content = json.dumps(asdict(holder)).encode()
    # A process killed between creating a file and filling it would look alive for a minute.
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    try:
        _write(partial, content)
        os.link(partial, path)
    except (FileExistsError, FileNotFoundError):  # or another job has removed the partial file
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, content)
    finally:
        partial.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, content: bytes) -> bool:
    try:
        _write(path, content)
    except FileExistsError:
        return False
    except OSError:
        # A full disk may have created the name without the content.
        path.unlink(missing_ok=True)
        raise
    return True


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _locks(folder: Path, prefix: str) -> Mapping[Path, Holder | None]:
    """Return the files of a lock with their holders; None for incomplete ones."""
    names = [name for name in os.listdir(folder) if name.startswith(prefix)]
    paths = [folder / name for name in names if name.removeprefix(prefix).isdecimal()]
    return {path: _read(path) for path in paths}


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read(path: Path) -> Holder | None:
    """Return the holder in a file; None if it is gone or incomplete."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError, TypeError):
        return None


def _start_of(process: int) -> int | None:
    """Return the clock ticks from boot to a process's start; None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in brackets and may contain anything: count fields from the end.
    state, *fields = text.rpartition(")")[2].split()
    # Zombies and dead processes only wait for their parent.
    return None if state in "ZX" else int(fields[18])


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # `/proc` may hide other users' processes.
    return f"{boot} {os.readlink('/proc/self/ns/pid')} user {os.getuid()}"
