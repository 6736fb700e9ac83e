"""Shard folders behind a URL, through a local cache filled on demand.

Webdataset's `gopen` opens the URLs: `pipe:COMMAND`, `http(s)://`, `gs://`, `sftp://`, `file://` and
more. A file of the cache is whole and has the manifest's hash, or is absent; processes of one
machine share it. It lies in a folder named after the manifest's hash, so what is cached of another
data set, or of another version, is never taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, write_atomically
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME, Manifest, ShardEntry
from megavis.data.format.shards import index_path

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
_FILE = "{file}"
_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)")
_CHUNK_BYTES = 1 << 20
_FETCHED_AT_ONCE = 8


class DamagedDownloadError(OSError):
    """Bytes that are not those of the manifest."""


def is_remote(path: Path | str) -> bool:
    """Say whether this is a URL and not a folder."""
    return _URL.match(str(path)) is not None


@dataclass(frozen=True)
class RemoteFolder:
    """A shard folder behind a URL and its place in the cache.

    Attributes:
        url: `{file}` in it is replaced by a file's name; where it is absent, a slash and the name
            follow the URL.
        directory: what is there of it; manifest, indexes and palette always are.
    """

    url: str
    directory: Path

    @classmethod
    def open(cls, url: str, cache: Path | str | None) -> RemoteFolder:
        """Fetch everything but the shards.

        Args:
            url: of the shard folder.
            cache: local folder that holds the caches.

        Raises:
            UserError: there is no cache, it has too little room, or a file cannot be fetched.
        """
        if cache is None:
            raise UserError(f"{url} is a URL: set data.cache to a local folder to keep it in")
        content = io.BytesIO()
        _insist(address(url, MANIFEST_NAME), lambda: _copy_whole(url, content))
        digest = hashlib.sha256(content.getvalue()).hexdigest()
        folder = cls(url, Path(cache) / digest[:16])
        folder.directory.mkdir(parents=True, exist_ok=True)
        if not (folder.directory / MANIFEST_NAME).exists():
            write_atomically(folder.directory / MANIFEST_NAME, content.getvalue())
        manifest = Manifest.read(folder.directory)
        folder._check_room(manifest)
        if manifest.kind == "palette":
            folder.fetch(PALETTE_NAME)  # the data set compares it with the manifest
        with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
            list(pool.map(folder._fetch_index, manifest.shards))
        return folder

    def shard(self, entry: ShardEntry) -> Path:
        """Return the path of a tar, fetched where it is not there yet. Raises UserError."""
        return self.fetch(entry.name, sha256=entry.sha256)

    def fetch(self, name: str, *, sha256: str | None = None) -> Path:
        """Return the path of a file in the cache, fetched where it is not there yet.

        Args:
            name: of the file.
            sha256: what its bytes must have.

        Raises:
            UserError: it cannot be fetched.
        """
        target = self.directory / name
        if not target.exists():
            with _locked(target):
                if not target.exists():  # another process may have been faster
                    source = address(self.url, name)
                    _insist(source, lambda: _download(source, target, sha256))
        return target

    def _fetch_index(self, entry: ShardEntry) -> None:
        self.fetch(index_path(Path(entry.name)).name, sha256=entry.index_sha256)

    def _check_room(self, manifest: Manifest) -> None:
        absent = [shard for shard in manifest.shards if not (self.directory / shard.name).exists()]
        missing = sum(shard.num_bytes for shard in absent)
        free = shutil.disk_usage(self.directory).free
        if missing > free:
            raise UserError(
                f"{self.directory} has room for {free / 1e9:.1f} GB, and {self.url} takes"
                f" {missing / 1e9:.1f} GB more: set data.cache to a folder on a larger disk"
            )


def address(url: str, name: str) -> str:
    """Return the URL of a file of a shard folder."""
    whole = url.replace(_FILE, name) if _FILE in url else f"{url.rstrip('/')}/{name}"
    if whole.startswith("s3://"):  # webdataset leaves S3 to the command-line client
        return f"pipe:aws s3 cp {shlex.quote(whole)} -"
    return whole


def _copy_whole(url: str, buffer: io.BytesIO) -> None:
    buffer.seek(0)
    buffer.truncate()
    _copy(address(url, MANIFEST_NAME), buffer)


def _download(source: str, target: Path, sha256: str | None) -> None:
    # Nobody else writes them: this process holds the file's lock.
    for partial in target.parent.glob(f".{target.name}.partial-*"):
        partial.unlink()
    with atomic_writer(target) as file:
        digest = _copy(source, file)
        if sha256 is not None and digest != sha256:
            raise DamagedDownloadError("its SHA-256 is not the manifest's: cut off, or changed")


def _copy(source: str, file: BinaryIO) -> str:
    """Copy what a URL gives; return its SHA-256. Raises OSError, also where a command fails."""
    # Imported here: reading local folders needs nothing of webdataset.
    from webdataset.gopen import gopen

    digest = hashlib.sha256()
    with gopen(source, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _insist(source: str, attempt: Callable[[], None]) -> None:
    """Try a few times, waiting longer each time; raise UserError after the last."""
    for number in range(ATTEMPTS):
        if number:
            time.sleep(PAUSE_SECONDS * 2 ** (number - 1))
        try:
            attempt()
            return
        except (OSError, ValueError) as error:
            reason = _in_short(error)
    raise UserError(f"{source} cannot be fetched, {ATTEMPTS} attempts: {reason}")


def _in_short(error: Exception) -> str:
    # webdataset's own message holds all that the command was started with.
    status = re.search(r": exit (-?\d+) \(read\)", str(error))
    return f"the command ends with status {status[1]}" if status else str(error)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of a file that is to be fetched, against threads and processes."""
    path = target.with_name(f".{target.name}.lock")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Who waits for it, or makes a new one, finds the file there and fetches nothing.
            path.unlink(missing_ok=True)
