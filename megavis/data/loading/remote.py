"""Read shard folders from URLs through a local cache that is filled on demand.

webdataset's `gopen` opens the URLs: `pipe:COMMAND`, `http(s)://`, `gs://`, `sftp://`, `file://` and
more. A cached file is complete and matches the manifest's hash. All processes of a machine share
the cache folder, which is named after the manifest's hash, so different data sets and versions
never collide.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, write_atomically
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME, Manifest, ShardEntry
from megavis.data.format.sample_index import SAMPLE_INDEX_NAME
from megavis.data.format.shards import index_path

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
_FILE = "{file}"
_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)")
_CHUNK_BYTES = 1 << 20
_FETCHED_AT_ONCE = 8


class DamagedDownloadError(OSError):
    """The bytes do not match the manifest's hash."""


def is_remote(path: Path | str) -> bool:
    """Return whether this is a URL rather than a local path."""
    return _URL.match(str(path)) is not None


@dataclass(frozen=True)
class RemoteFolder:
    """A shard folder at a URL, and its cache.

    Attributes:
        url: `{file}` in it is replaced by a file's name; otherwise a slash and the name are
            appended.
        directory: the cache, which always has the manifest, indexes and palette.
    """

    url: str
    directory: Path

    @classmethod
    def open(cls, url: str, cache: Path | str | None) -> RemoteFolder:
        """Fetch everything but the shards into a folder of the caches of all data sets.

        Raises:
            UserError: `cache` is None, cannot be written or is too small, or a file cannot be
                fetched.
        """
        if cache is None:
            raise UserError(f"{url} is a URL: set data.cache to a local folder")
        try:
            return cls._open(url, Path(cache))
        except OSError as error:
            raise UserError(str(error)) from None

    @classmethod
    def _open(cls, url: str, cache: Path) -> RemoteFolder:
        source, buffer = file_url(url, MANIFEST_NAME), io.BytesIO()

        def download() -> None:
            buffer.seek(0)
            buffer.truncate()
            _copy(source, buffer)

        _retry(source, download)
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        folder = cls(url, cache / digest[:16])
        folder.directory.mkdir(parents=True, exist_ok=True)
        if not (folder.directory / MANIFEST_NAME).exists():
            write_atomically(folder.directory / MANIFEST_NAME, buffer.getvalue())
        manifest = Manifest.read(folder.directory)
        # Before training: shards are fetched as they are needed, and the disk could fill up days
        # later.
        folder._check_room(manifest)
        if manifest.kind == "palette":
            folder.fetch(PALETTE_NAME)  # checked by the data set
        folder.fetch(SAMPLE_INDEX_NAME, sha256=manifest.index_sha256)
        with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
            list(pool.map(folder._fetch_index, manifest.shards))
        return folder

    def shard(self, entry: ShardEntry) -> Path:
        """Return the path of a tar, fetching it if needed.

        Raises OSError: the folder was found before, so this is not a user's mistake, and a
        scheduler should start the run again.
        """
        return self.fetch(entry.name, sha256=entry.sha256)

    def fetch(self, name: str, *, sha256: str | None = None) -> Path:
        """Return the path of a file in the cache, fetching it if needed. Raises OSError."""
        target = self.directory / name
        if not target.exists():
            with _locked(target):
                if not target.exists():  # another process may have fetched it
                    source = file_url(self.url, name)
                    _retry(source, lambda: _download(source, target, sha256))
        return target

    def _fetch_index(self, entry: ShardEntry) -> None:
        self.fetch(index_path(Path(entry.name)).name, sha256=entry.index_sha256)

    def _check_room(self, manifest: Manifest) -> None:
        absent = [shard for shard in manifest.shards if not (self.directory / shard.name).exists()]
        missing = sum(shard.num_bytes for shard in absent)
        free = shutil.disk_usage(self.directory).free
        if missing > free:
            raise UserError(
                f"{self.directory} has {free / 1e9:.1f} GB free, but {self.url} needs"
                f" {missing / 1e9:.1f} GB more: set data.cache to a folder on a larger disk"
            )


def file_url(url: str, name: str) -> str:
    """Return the URL of a file in a shard folder."""
    whole = url.replace(_FILE, name) if _FILE in url else f"{url.rstrip('/')}/{name}"
    if whole.startswith("s3://"):  # webdataset does not read s3://
        return f"pipe:aws s3 cp {shlex.quote(whole)} -"
    return whole


def _download(source: str, target: Path, sha256: str | None) -> None:
    # Left by killed processes: this process holds the lock.
    for partial in target.parent.glob(f".{target.name}.partial-*"):
        partial.unlink()
    with atomic_writer(target) as file:
        digest = _copy(source, file)
        if sha256 is not None and digest != sha256:
            raise DamagedDownloadError(
                "its SHA-256 differs from the manifest: truncated or changed"
            )


def _copy(source: str, file: BinaryIO) -> str:
    """Download a URL; return its SHA-256. Raises OSError, also if a `pipe:` command fails."""
    # Imported here, since local folders are read without webdataset.
    from webdataset.gopen import gopen

    digest = hashlib.sha256()
    with gopen(source, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _retry(source: str, attempt: Callable[[], None]) -> None:
    """Try a few times with exponential backoff; raise OSError after the last attempt."""
    for number in range(ATTEMPTS):
        if number:
            time.sleep(PAUSE_SECONDS * 2 ** (number - 1))
        try:
            attempt()
            return
        except (OSError, ValueError) as error:
            reason = _short_reason(error)
    raise OSError(f"{source} cannot be fetched after {ATTEMPTS} attempts: {reason}")


def _short_reason(error: Exception) -> str:
    # webdataset's message repeats all arguments of the command.
    status = re.search(r": exit (-?\d+) \(read\)", str(error))
    return f"the command exited with status {status[1]}" if status else str(error)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Lock a file to fetch, against other threads and processes."""
    path = target.with_name(f".{target.name}.lock")
    with _lock(path):
        try:
            yield
        finally:
            # Waiters, and processes that create a new lock, then find the fetched file.
            path.unlink(missing_ok=True)


def _lock(path: Path) -> IO[str]:
    """Return an open file that nobody else has locked."""
    while True:
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A holder removes it at the end. Whoever has waited meanwhile holds a file without a name,
        # which keeps out nobody who creates another.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
