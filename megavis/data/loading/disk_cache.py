"""A folder of fetched files that all processes of a machine share, of bounded size.

fsspec's `filecache` has neither a bound, nor locks between processes, nor hashes, and writes under
the final name, where a killed process leaves a part that is taken for the whole.

Locks are flock's, which the kernel drops when a process ends, however it ends:

- the folder's `.lock` is held for moments, while names appear and vanish and sizes are added up;
- `.NAME.partial` is locked by the process that fills it, and has the size that it will have, so
  that others leave room for it. One that nobody has locked is left over from a killed process;
- a file is locked for sharing by every process that has it open or mapped, or holds it for later,
  from the moment that it has its name. An eviction locks it for itself, without waiting, so it
  passes over such files.

A file's time stamp is its last use: when it was opened last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

WAIT_SECONDS = 300.0
"""How long a reader waits for room while other processes have all files open."""
_LOCK = ".lock"
_PARTIAL = ".partial"
_EVICTED = ".tar"
_POLL_SECONDS = 0.1


class FullCacheError(OSError):
    """Nothing can be evicted: all that is there is in use."""


@dataclass(frozen=True)
class Wanted:
    """A file that should be in a cache.

    Attributes:
        path: in a folder of the cache.
        size: in bytes, or None if it is not known before it has been fetched.
        fill: writes the content into an open file; raises if it cannot.
    """

    path: Path
    size: int | None
    fill: Callable[[BinaryIO], None]


class DiskCache:
    """Files in the folders of a folder.

    Args:
        folder: is created.
        limit: bytes of all files together, None for no bound. Only tars are evicted.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            # What killed processes have left.
            for partial in folder.glob(f"*/.*{_PARTIAL}"):
                _evict(partial)

    def open(self, wanted: Wanted, *, when_full: Callable[[], None] = lambda: None) -> FileIO:
        """Return an open file, which is not evicted before it is closed; fill it if it is absent.

        A map of the file keeps it too, after the file object is closed.

        Args:
            when_full: called when there is no room; may close files of this process.

        Raises:
            FullCacheError: all files have been in use for `WAIT_SECONDS`.
            Exception: what `fill` raises.
        """
        until = time.monotonic() + WAIT_SECONDS
        while True:
            file = self._open_whole(wanted)
            if file is not None:
                return file
            try:
                file = self._fetch(wanted, set, wait=True)
            except FullCacheError:
                if time.monotonic() > until:
                    raise
                when_full()
                time.sleep(_POLL_SECONDS)
                continue
            if file is not None:
                return file

    def hold(self, wanted: Wanted, spare: Callable[[], Collection[str]]) -> FileIO | None:
        """Keep a file from being evicted until the returned one is closed; fill it if it is absent.

        Args:
            spare: names of files that are not evicted for it. Asked when nothing else can change
                the folder: a file that it does not name is not filled.

        Returns:
            None if another process or thread fills it, or `spare` does not name it any more.

        Raises:
            FullCacheError: there is no room.
            Exception: what `fill` raises.
        """
        return self._open_whole(wanted) or self._fetch(wanted, spare, wait=False)

    def _fetch(
        self, wanted: Wanted, spare: Callable[[], Collection[str]], *, wait: bool
    ) -> FileIO | None:
        """Fill a file that is absent, and open it; with `wait`, also what another is filling.

        Returns None if that has failed, or the file is there by now.
        """
        partial = wanted.path.with_name(f".{wanted.path.name}{_PARTIAL}")
        with self._locked():
            names = spare()
            if wanted.path.exists() or (not wait and wanted.path.name not in names):
                return None
            file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
            is_own = _try_lock(file)
            if is_own:
                try:
                    file.truncate(0)
                    self._make_room(wanted, names)
                    file.truncate(wanted.size or 0)
                except BaseException:
                    partial.unlink()
                    file.close()
                    raise
        with file:
            if is_own:
                self._fill(file, partial, wanted)
            elif wait:
                fcntl.flock(file, fcntl.LOCK_SH)
            else:
                return None
            # While it is still locked as what it was filled under.
            return self._open_whole(wanted)

    def _fill(self, file: BinaryIO, partial: Path, wanted: Wanted) -> None:
        try:
            wanted.fill(file)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            with self._locked():
                partial.unlink()
            raise
        with self._locked():
            partial.rename(wanted.path)
            # Nobody can evict it in between.
            fcntl.flock(file, fcntl.LOCK_SH)

    def _open_whole(self, wanted: Wanted) -> FileIO | None:
        """Return a file, locked for sharing, or None if it is absent or has another size."""
        try:
            file = FileIO(wanted.path)
        except FileNotFoundError:
            return None
        # Waits for an eviction, after which the file has no name any more.
        fcntl.flock(file, fcntl.LOCK_SH)
        if _has_name(file, wanted.path):
            if wanted.size in (None, os.fstat(file.fileno()).st_size):
                # Another user's file keeps its time.
                with contextlib.suppress(PermissionError):
                    os.utime(wanted.path)
                return file
            # After a power failure, or somebody's change.
            with self._locked():
                if _has_name(file, wanted.path):
                    wanted.path.unlink()
        file.close()
        return None

    def _make_room(self, wanted: Wanted, spare: Collection[str]) -> None:
        """Evict files, those that were opened longest ago first. Raises FullCacheError."""
        if self.limit is None:
            return
        files = list(cached_files(self.folder))
        excess = sum(stat.st_size for _, stat in files) + (wanted.size or 0) - self.limit
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime):
            if excess <= 0:
                return
            if path.suffix == _EVICTED and path.name not in spare and _evict(path):
                excess -= stat.st_size
        # What is never evicted must be there in any case, and whoever sets the bound counts it.
        if excess > 0 and wanted.path.suffix == _EVICTED:
            raise FullCacheError(
                f"{self.folder} is full: data.cache_gib allows {self.limit / 2**30:.3g} GiB, and"
                f" {wanted.path.name} takes {excess / 2**30:.3g} more than what is not in use"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def cached_files(cache: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all files of a cache, also unfinished ones, with their sizes and times."""
    for folder in cache.iterdir():
        # Others delete folders without asking.
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as each,
        ):
            for entry in each:
                yield Path(entry.path), entry.stat()


def _try_lock(file: BinaryIO | FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _evict(path: Path) -> bool:
    """Delete a file unless somebody has locked it; return whether it is gone."""
    try:
        with FileIO(path) as file:
            if not _try_lock(file):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True


def _has_name(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
