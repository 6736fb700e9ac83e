"""A shard folder at a URL, whose files are fetched into a cache on demand.

A cached file is complete and matches the manifest's hash. All processes of a machine share the
cache; the folder in it is named after the manifest's hash, so different data sets and versions
never collide.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME, Manifest, ShardEntry
from megavis.data.format.sample_index import SAMPLE_INDEX_NAME, index_bytes
from megavis.data.format.shards import index_path
from megavis.data.loading.disk_cache import DiskCache, Wanted, cached_files
from megavis.data.loading.stores import Store

_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)")


def is_remote(path: Path | str) -> bool:
    """Return whether this is a URL rather than a local path."""
    return _URL.match(str(path)) is not None


def stored_manifest(store: Store) -> tuple[Manifest, bytes]:
    """Return a folder's manifest, and its bytes. Raises OSError, and UserError if it has none."""
    buffer = io.BytesIO()
    store.copy(MANIFEST_NAME, buffer)
    content = buffer.getvalue()
    return Manifest.parse(content, store.url_of(MANIFEST_NAME)), content


@dataclass(frozen=True)
class RemoteFolder:
    """A shard folder at a URL, and its cache.

    Attributes:
        store: reads its files.
        directory: the cache, which always has the manifest, the index of samples and the palette.
        cache: the folder of the caches of all data sets.
    """

    store: Store
    directory: Path
    cache: DiskCache

    @classmethod
    def open(cls, url: str, cache: Path | str | None, *, limit: int | None = None) -> RemoteFolder:
        """Fetch the manifest, the index of samples and the palette.

        Args:
            url: see `Store`.
            cache: folder of the caches of all data sets.
            limit: size limit of all caches together in bytes; None: no limit.

        Raises:
            UserError: `cache` is None, cannot be written or is too small, or a file cannot be
                fetched.
        """
        if cache is None:
            raise UserError(f"{url} is a URL: set it to a local folder", key="data.cache")
        try:
            return cls._open(url, Path(cache), limit)
        except OSError as error:
            raise UserError(str(error)) from None

    @classmethod
    def _open(cls, url: str, cache: Path, limit: int | None) -> RemoteFolder:
        store = Store(url)
        manifest, content = stored_manifest(store)
        directory = cache / hashlib.sha256(content).hexdigest()[:16]
        folder = cls(store, directory, DiskCache(cache, limit))
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / MANIFEST_NAME).exists():
            write_atomically(directory / MANIFEST_NAME, content)
        # Check before training: shards are fetched on demand, and the disk could fill up days
        # later.
        folder._check_room(manifest)
        if manifest.kind == "palette":
            folder._fetch(PALETTE_NAME)  # checked by the data set
        folder._fetch_index(manifest)
        return folder

    def open_shard(
        self, entry: ShardEntry, *, when_full: Callable[[], None] = lambda: None
    ) -> FileIO:
        """Return an open tar, which stays in the cache until it is closed; fetch it if needed.

        Args:
            when_full: see `DiskCache.open`.

        Raises:
            OSError: the tar cannot be fetched. The folder was found before, so this is not a user's
                mistake, and a scheduler should restart the run.
            UserError: the store reports that the tar does not exist, or may not be read.
        """
        return self.cache.open(self._shard(entry), when_full=when_full)

    def hold(self, entry: ShardEntry, needed: Callable[[], Collection[str]]) -> FileIO | None:
        """Fetch a tar unless it is cached or being fetched, and keep it from being evicted.

        Args:
            needed: returns the names of tars that must not be evicted for it, including itself.

        Returns:
            An open file, which prevents eviction until it is closed; None as in `DiskCache.hold`.

        Raises:
            FullCacheError: there is no room. Other exceptions are those of `open_shard`.
        """
        return self.cache.hold(self._shard(entry), needed)

    def index_of(self, entry: ShardEntry) -> Path:
        """Return the JSON index of a shard, fetching it if needed. Raises as `open_shard`."""
        return self._fetch(index_path(Path(entry.name)).name, None, entry.index_sha256)

    def _shard(self, entry: ShardEntry) -> Wanted:
        return self._wanted(entry.name, entry.num_bytes, entry.sha256)

    def _wanted(self, name: str, size: int | None, sha256: str | None) -> Wanted:
        fill = partial(self.store.copy, name, size=size, sha256=sha256)
        return Wanted(self.directory / name, size, fill)

    def _fetch(self, name: str, size: int | None = None, sha256: str | None = None) -> Path:
        wanted = self._wanted(name, size, sha256)
        self.cache.open(wanted).close()
        return wanted.path

    def _fetch_index(self, manifest: Manifest) -> None:
        """Fetch the index of samples; raises UserError with the command that makes it."""
        command = "`python -m data_tools index FOLDER` where its files are, and upload"
        if manifest.index_sha256 is None:
            raise UserError(
                f"{self.store.url} was made before shard folders had {SAMPLE_INDEX_NAME}: run"
                f" {command} {SAMPLE_INDEX_NAME} and {MANIFEST_NAME}"
            )
        size = index_bytes(len(manifest.shards), manifest.num_samples)
        try:
            self._fetch(SAMPLE_INDEX_NAME, size, manifest.index_sha256)
        except UserError as error:
            raise UserError(f"{error}; if it is lost, run {command} it") from None

    def _check_room(self, manifest: Manifest) -> None:
        """Check that the disk has room for the cache to grow to its limit; raises UserError."""
        present = sum(stat.st_size for _, stat in cached_files(self.cache.folder))
        absent = [shard for shard in manifest.shards if not (self.directory / shard.name).exists()]
        missing = sum(shard.num_bytes for shard in absent)
        if self.cache.limit is not None:
            missing = min(missing, max(0, self.cache.limit - present))
        free = shutil.disk_usage(self.directory).free
        if missing > free:
            raise UserError(
                f"{self.directory} has {free / 1e9:.1f} GB free, but {self.store.url} needs"
                f" {missing / 1e9:.1f} GB more: set data.cache to a folder on a larger disk, or"
                " data.cache_gib to a smaller size",
                key="data.cache",
            )
