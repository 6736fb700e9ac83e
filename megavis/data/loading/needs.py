"""Requirements of training data: open files, an index in memory, and room in a cache.

Computed from manifests only. Rates are per sample; multiply them by the samples read per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megavis.config.errors import counted
from megavis.config.section import ConfigIssue, DataConfig
from megavis.data.format.manifest import Manifest
from megavis.data.format.sample_index import index_bytes
from megavis.data.loading.remote import is_remote
from megavis.parallel.limits import most_open_maps

GIB = 1 << 30


@dataclass(frozen=True)
class FolderNeeds:
    """Requirements of one training folder.

    Attributes:
        num_samples, num_shards: size of the folder.
        share: share of the training samples.
        num_windows: windows of an epoch.
        window_shards: shards of the largest window.
        at_once: shards that a process reads from at once: two windows, since a batch may span two,
            or all shards.
        kept: number of these that it keeps open.
        num_bytes: size of all shards.
        window_bytes: size of the largest shards that one window can have.
        index_bytes: size of the index that all processes of a machine map.
        is_remote: whether shards are fetched into the cache.
    """

    num_samples: int
    num_shards: int
    share: float
    num_windows: int
    window_shards: int
    at_once: int
    kept: int
    num_bytes: int
    window_bytes: int
    index_bytes: int
    is_remote: bool

    @property
    def opens_a_sample(self) -> float:
        """Files that a process opens for each sample that it reads from this folder."""
        if self.kept >= self.window_shards:
            # Each shard once, or once per epoch with windows.
            return 0.0 if self.num_windows == 1 else self.num_shards / self.num_samples
        return 1 - self.kept / self.window_shards


@dataclass(frozen=True)
class DataNeeds:
    """Requirements of a config's training data.

    Attributes:
        folders: requirements of each training folder.
        cache_limit: size limit of `data.cache` in bytes, or None.
        allowed: files that a process may have open.
    """

    folders: tuple[FolderNeeds, ...]
    cache_limit: int | None
    allowed: int

    @property
    def at_once(self) -> int:
        """Shards that a process reads from at once."""
        return sum(folder.at_once for folder in self.folders)

    @property
    def kept(self) -> int:
        """Number of these shards that it keeps open."""
        return sum(folder.kept for folder in self.folders)

    @property
    def index_bytes(self) -> int:
        """Size of the indexes, which all processes of a machine map."""
        return sum(folder.index_bytes for folder in self.folders)

    @property
    def bytes_a_sample(self) -> float:
        """Stored bytes of a training sample, on average."""
        return sum(each.share * each.num_bytes / each.num_samples for each in self.folders)

    @property
    def opens_a_sample(self) -> float:
        """Files that a process opens for each sample that it reads, on average."""
        return sum(each.share * each.opens_a_sample for each in self.folders)

    @property
    def remote(self) -> tuple[FolderNeeds, ...]:
        """The folders at URLs."""
        return tuple(folder for folder in self.folders if folder.is_remote)

    def cache_bytes(self, num_windows: int | None = None) -> int:
        """Return the bytes that `num_windows` windows of each folder take; None: all shards."""
        return sum(
            folder.index_bytes + min(folder.num_bytes, num_windows * folder.window_bytes)
            if num_windows and folder.num_windows > 1
            else folder.index_bytes + folder.num_bytes
            for folder in self.remote
        )

    @property
    def fetched_a_sample(self) -> float:
        """Bytes that each machine fetches per sample read by all machines together.

        Each machine reads from all shards of a window, so it fetches all of them once per epoch,
        unless the cache keeps them.
        """
        if self.cache_limit is None or self.cache_limit >= self.cache_bytes():
            return 0.0
        return sum(each.share * each.num_bytes / each.num_samples for each in self.remote)

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yield requirements that cannot be met, each with the key to change."""
        yield from self._cache_complaints()
        if self.at_once > self.allowed:
            most = max(1, self.allowed // 8 // len(self.folders))
            yield (
                "data.window_shards",
                f"{self.at_once:,} shards are read at once, and a process may have"
                f" {self.allowed:,} files open here (`ulimit -Hn`): set it to {most} or less",
            )

    def _cache_complaints(self) -> Iterator[ConfigIssue]:
        if self.cache_limit is None or self.cache_limit >= self.cache_bytes(1):
            return
        least, good = (self.cache_bytes(count) / GIB for count in (1, 2))
        has = f"{self.cache_limit / GIB:.3g} GiB are too small:"
        if any(folder.num_windows > 1 for folder in self.remote):
            yield (
                "data.cache_gib",
                f"{has} the shards that are read at once, with the index, take {least:.3g}; set"
                f" {good:.3g}, so that the next ones can be fetched meanwhile, or fewer"
                " data.window_shards",
            )
        else:
            yield (
                "data.cache_gib",
                f"{has} all shards are read at once, which take {least:.3g} with the index; set"
                " that, or data.window_shards",
            )


def data_needs(data: DataConfig, manifests: Sequence[Manifest], allowed: int) -> DataNeeds:
    """Return the needs of training data.

    Args:
        data: the config.
        manifests: manifest of each training folder, in the config's order.
        allowed: files that a process may have open.
    """
    sources = data.train_sources
    total = sum(source.weight for source in sources)
    folders = [
        _folder_needs(
            manifest,
            window=data.window_shards,
            share=source.weight / total,
            most=most_open_maps(len(sources), allowed=allowed),
            remote=is_remote(source.path),
        )
        for source, manifest in zip(sources, manifests, strict=True)
    ]
    return DataNeeds(tuple(folders), data.cache_limit, allowed)


def _folder_needs(
    manifest: Manifest, *, window: int | None, share: float, most: int, remote: bool
) -> FolderNeeds:
    sizes = sorted((shard.num_bytes for shard in manifest.shards), reverse=True)
    num_windows = -(-len(sizes) // (window or len(sizes)))
    largest = -(-len(sizes) // num_windows)
    at_once = min(len(sizes), 2 * largest)
    return FolderNeeds(
        num_samples=manifest.num_samples,
        num_shards=len(sizes),
        share=share,
        num_windows=num_windows,
        window_shards=largest,
        at_once=at_once,
        kept=min(at_once, most),
        num_bytes=sum(sizes),
        window_bytes=sum(sizes[:largest]),
        index_bytes=index_bytes(len(sizes), manifest.num_samples),
        is_remote=remote,
    )


def needs_lines(needs: DataNeeds) -> Iterator[str]:
    """Yield sentences on the requirements of the data, with a separate one for a cache."""
    samples = sum(folder.num_samples for folder in needs.folders)
    shards = counted(sum(folder.num_shards for folder in needs.folders), "shard")
    kept = f"keeps {needs.kept:,} of them open"
    if needs.kept < needs.at_once:
        kept += f", and opens others for most samples, at most {needs.allowed:,} files being open"
    yield (
        f"{counted(samples, 'sample')} in {shards}, {needs.bytes_a_sample:,.0f} bytes each; a"
        f" process reads from {counted(needs.at_once, 'shard')} at once and {kept}; the index takes"
        f" {needs.index_bytes / 1e6:,.1f} MB a node, which its processes share"
    )
    if not needs.remote:
        return
    room = ", ".join(
        f"{what} {needs.cache_bytes(count) / GIB:.3g} GiB"
        for what, count in (("one window", 1), ("two", 2), ("all", None))
    )
    bound = "has no bound" if needs.cache_limit is None else f"{needs.cache_limit / GIB:.3g} GiB"
    yield f"data.cache on each node: {room}; data.cache_gib {bound}"
