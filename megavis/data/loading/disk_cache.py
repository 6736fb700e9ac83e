"""A folder of fetched files that all processes of a machine share, of bounded size.

fsspec's `filecache` has no size limit, no locks between processes and no hashes, and it writes
under the final name, where a killed process leaves a partial file that is mistaken for a complete
one.

Locks are flock's, which the kernel releases when a process ends, however it ends:

- the folder's `.lock` is held briefly, while names appear and vanish and sizes are added up;
- `.NAME.partial` is locked by the process that fills it, and has its final size, so that others
  leave room for it. One that is not locked was left by a killed process;
- a file has a shared lock of every process that has it open or mapped, or holds it for later, from
  the moment that it has its name. Eviction takes an exclusive lock without waiting, so it skips
  such files.

A file's time stamp is the time it was last opened.
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
    """Nothing can be evicted: all files are in use."""


@dataclass(frozen=True)
class Wanted:
    """A file that should be in a cache.

    Attributes:
        path: path in a folder of the cache.
        size: size in bytes, or None if it is unknown before fetching.
        fill: writes the content into an open file; raises if it cannot.
    """

    path: Path
    size: int | None
    fill: Callable[[BinaryIO], None]


class DiskCache:
    """Files in the folders of a folder.

    Args:
        folder: the folder, which is created.
        limit: size limit of all files together in bytes; None: no limit. Only tars are evicted.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            # Remove files left by killed processes.
            for partial in folder.glob(f"*/.*{_PARTIAL}"):
                _evict(partial)

    def open(self, wanted: Wanted, *, when_full: Callable[[], None] = lambda: None) -> FileIO:
        """Return an open file, which is not evicted while open; fill it if it is absent.

        A map of the file also prevents eviction, even after the file object is closed.

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
        """Keep a file from being evicted until the returned file is closed; fill it if absent.

        Args:
            spare: returns the names of files that must not be evicted for it. Called while nothing
                else can change the folder; a file that it does not name is not filled.

        Returns:
            None if another process or thread fills it, or `spare` no longer names it.

        Raises:
            FullCacheError: there is no room.
            Exception: what `fill` raises.
        """
        return self._open_whole(wanted) or self._fetch(wanted, spare, wait=False)

    def _fetch(
        self, wanted: Wanted, spare: Callable[[], Collection[str]], *, wait: bool
    ) -> FileIO | None:
        """Fill an absent file and open it; with `wait`, also wait for another process to fill it.

        Returns None if that has failed, or if the file has appeared in the meantime.
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
            # While it is still locked under its partial name.
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
            # The folder's lock prevents eviction in between.
            fcntl.flock(file, fcntl.LOCK_SH)

    def _open_whole(self, wanted: Wanted) -> FileIO | None:
        """Return a file, locked for sharing, or None if it is absent or has another size."""
        try:
            file = FileIO(wanted.path)
        except FileNotFoundError:
            return None
        # This may wait for an eviction, after which the file no longer has a name.
        fcntl.flock(file, fcntl.LOCK_SH)
        if _has_name(file, wanted.path):
            if wanted.size in (None, os.fstat(file.fileno()).st_size):
                # The time of another user's file cannot be changed.
                with contextlib.suppress(PermissionError):
                    os.utime(wanted.path)
                return file
            # Truncated by a power failure, or changed.
            with self._locked():
                if _has_name(file, wanted.path):
                    wanted.path.unlink()
        file.close()
        return None

    def _make_room(self, wanted: Wanted, spare: Collection[str]) -> None:
        """Evict files, the least recently opened first. Raises FullCacheError."""
        if self.limit is None:
            return
        files = list(cached_files(self.folder))
        excess = sum(stat.st_size for _, stat in files) + (wanted.size or 0) - self.limit
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime):
            if excess <= 0:
                return
            if path.suffix == _EVICTED and path.name not in spare and _evict(path):
                excess -= stat.st_size
        # Files that are never evicted count towards the limit too.
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
    # Other processes or users may delete folders and files at any time.
    for folder in cache.iterdir():
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                try:
                    found = entry.stat()
                except FileNotFoundError:
                    continue
                yield Path(entry.path), found


def _try_lock(file: BinaryIO | FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _evict(path: Path) -> bool:
    """Delete a file unless it is locked; return whether it is gone."""
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
