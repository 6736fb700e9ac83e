"""A shard folder as a map-style data set, and subsets of it.

Opening reads only the manifest and the head of the index, and runs cheap checks (sizes, hashes);
`data_tools verify` reads every byte. The index is memory-mapped, tars on first use: the processes
of a node share both, and a process keeps nothing per sample.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megavis.config.errors import UserError, describe_os_error
from megavis.data.codecs.codec import PaletteLike, Refusals
from megavis.data.codecs.registry import codec_of
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import PALETTE_NAME, Manifest, ShardEntry
from megavis.data.format.sample_index import SampleIndex
from megavis.data.loading.open_shards import Content, OpenShards, ShardFile
from megavis.data.loading.order import Order, SampleOrder, WindowedOrder
from megavis.data.loading.read_ahead import AnnouncedOrder, Held, Needed, ReadAhead
from megavis.data.loading.remote import RemoteFolder, is_remote
from megavis.parallel.limits import allow_open_files, most_open_maps

_NOTHING = np.empty(0, np.uint8)
_WRONG_LENGTH = "wrong length"
_FEWER = 0.6
"""Share of the classes expected among random images below which the first ones are not random."""


class ShardDataset:
    """All samples of a shard folder, by index.

    An invalid sample (wrong length, ids outside the vocabulary, a damaged JPEG, non-finite latents)
    is replaced by the next valid one, counted in `skipped` and named in `skipped_names`. The
    replacement depends on the bytes only, so it is the same on every rank.

    Args:
        directory: the shard folder or its URL (`remote.py`).
        transform: crop and augmentation; if None, images are read as stored.
        cache: local folder for files fetched from URLs.
        cache_limit: bytes of that folder; default: no bound.
        palette: maps the pixels of JPEG shards to ids; palette shards must have been made with it.
        window_shards: shards whose samples are mixed in the training order; default: all.

    Attributes:
        directory: the shard folder; its cache for a URL.
        manifest: the folder's; with a palette, a manifest of the resulting ids.
        class_names: names of the classes, indexed by label.
        num_parts: data sets that are read together, in a blend; they share the open files.

    Raises:
        UserError: the folder is unfinished, empty or damaged, or was made with another palette.
    """

    def __init__(
        self,
        directory: Path | str,
        transform: Transform | None = None,
        *,
        cache: Path | str | None = None,
        cache_limit: int | None = None,
        palette: PaletteLike | None = None,
        window_shards: int | None = None,
    ) -> None:
        self._remote: RemoteFolder | None = None
        self._ahead: dict[int, ReadAhead] = {}  # by seed
        if is_remote(directory):
            self._remote = RemoteFolder.open(str(directory), cache, limit=cache_limit)
        self.directory = self._remote.directory if self._remote else Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.transform, self.num_parts, self._window_shards = transform, 1, window_shards
        try:
            self.codec = codec_of(self.manifest, transform, palette=palette)
        except UserError as error:
            raise UserError(f"{self.directory} {error.fault}", remedy=error.remedy) from None
        self.class_names = self.manifest.class_names
        self._skipped: Counter[str] = Counter()
        self._skipped_names: dict[str, None] = {}
        self._lock = Lock()
        if not self.manifest.num_samples:
            raise UserError(f"{self.directory} holds no sample: every source file was rejected")
        if self.manifest.kind == "palette":
            _check_palette(self.directory, self.manifest)
        elif palette is not None:
            size = (transform or self.manifest).image_size or 0
            self.manifest = self.manifest.as_palette(palette.sha256, len(palette), image_size=size)
        if self._remote is None:
            for shard in self.manifest.shards:
                _check_size(self.directory / shard.name, shard)
        self._open_index()
        self._num_bytes = np.array([shard.num_bytes for shard in self.manifest.shards])
        self._wrong, self._in_their_place = self._find_replacements()
        for index in self._wrong.tolist():
            self._name_skipped(index, _WRONG_LENGTH)
        bounds = self._index.summaries
        if bounds["least_label"].min() < -1 or bounds["most_label"].max() >= len(self.class_names):
            raise UserError(f"{self.directory} holds labels outside its list of classes")

    def __len__(self) -> int:
        return int(self._index.first[-1])

    def __getstate__(self) -> dict[str, Any]:
        # Maps would be pickled by content, and locks cannot be pickled; the receiver reopens the
        # files.
        return {**self.__dict__, "_open": None, "_lock": None, "_index": None, "_ahead": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())
        self._open_index()

    def _open_index(self) -> None:
        json_index = self._remote.index_of if self._remote else None
        self._index = SampleIndex(self.directory, self.manifest, json_index=json_index)
        self._open = OpenShards(self._index.release)

    @property
    def labels(self) -> np.ndarray:
        """Labels int64 `[N]`, -1 for a sample without a label; not cached.

        A replaced sample has the label of its replacement.
        """
        labels = self._index.labels()
        labels[self._wrong] = labels[self._in_their_place]
        return labels

    @property
    def num_unlabelled(self) -> int:
        """Number of samples without a label, counted without listing all labels."""
        wrong, right = (
            self._index.take(each)[0]["label"] for each in (self._wrong, self._in_their_place)
        )
        of_all = int(self._index.summaries["num_unlabelled"].sum())
        return of_all + int((right < 0).sum()) - int((wrong < 0).sum())

    @property
    def skipped(self) -> Counter[str]:
        """Number of samples replaced so far, by reason; a copy, since loader threads add to it."""
        with self._lock:
            return self._skipped.copy()

    @property
    def skipped_names(self) -> list[str]:
        """`shard:key: reason` of each sample replaced so far."""
        with self._lock:
            return list(self._skipped_names)

    def order(self, seed: int) -> Order:
        """Return the training order; for a URL, using it also fetches shards ahead."""
        sizes = [shard.num_samples for shard in self.manifest.shards]
        windows = WindowedOrder(sizes, self._window_shards or len(sizes), seed)
        order = SampleOrder(len(self), seed) if self.num_windows == 1 else windows
        if self._remote is None:
            return order
        ahead = self._ahead.get(seed)
        if ahead is None:
            hold = _holder(self._remote, self.manifest.shards)
            most = 0 if self._remote.cache.limit is None else self.most_open_shards
            ahead = ReadAhead(windows, hold, self._open.keep_only, most=most)
            self._ahead[seed] = ahead
            weakref.finalize(self, ahead.close)
        ahead.restart()
        return AnnouncedOrder(order, ahead)

    @property
    def num_windows(self) -> int:
        """Number of windows of shards in an epoch of the training order."""
        num_shards = len(self.manifest.shards)
        return -(-num_shards // (self._window_shards or num_shards))

    @property
    def most_open_shards(self) -> int:
        """Number of shards that this process keeps open: two windows, if the system allows it."""
        most = most_open_maps(self.num_parts)
        # A batch may span two windows.
        return most if self.num_windows == 1 else min(most, 2 * (self._window_shards or 1))

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read samples.

        Args:
            indices: int64 `[b]`.
            positions: int64 `[b]`, which determine random crops and flips; default: `indices`.

        Returns:
            The samples in the form of their codec (ids uint16 `[b, n]`, pixels uint8
            `[b, h, w, 3]`, pairs uint8 `[b, 2, h, w, 3]`, latents float16 `[b, 2, c, h, w]`,
            recordings float32 `[b, n, d]`), and labels int64 `[b]`.

        Raises:
            IndexError: an index lies outside [0, N).
            OSError: a shard cannot be read or fetched any more.
            UserError: no sample is valid.
        """
        indices = checked_indices(indices, len(self))
        positions = indices if positions is None else positions
        try:
            return self._read(self._valid(indices), positions)
        finally:
            for ahead in self._ahead.values():
                ahead.end()

    def _read(self, indices: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        samples, refused = self._decode(indices, positions)
        for _ in range(len(self)):
            if not refused:
                return samples, self._index.take(indices)[0]["label"].astype(np.int64)
            for row, reason in refused.items():
                self._name_skipped(int(indices[row]), reason)
            rows = np.array(sorted(refused))
            # The next sample may have a wrong length too, and need its own replacement.
            indices[rows] = self._valid((indices[rows] + 1) % len(self))
            samples[rows], still = self._decode(indices[rows], positions[rows])
            refused = {int(rows[place]): reason for place, reason in still.items()}
        first = next(iter(self._skipped_names), "none")
        raise UserError(f"{self.directory} holds no valid sample; first: {first}")

    def name_of(self, index: int) -> str:
        """Return `shard:key` of one sample."""
        shard = self._index.shard_of(index)
        return f"{self.manifest.shards[shard].name}:{self._index.key(index)}"

    def payload(self, index: int) -> bytes:
        """Return the stored bytes of a sample or its replacement. Raises IndexError."""
        [payload] = self._payloads(self._valid(checked_indices(np.array([index]), len(self))))
        return payload.tobytes()

    def _decode(self, indices: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode samples whose payloads have valid lengths."""
        return self.codec.decode(self._payloads(indices), positions)

    def _payloads(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the bytes of samples, uint8 `[length]` each."""
        records, shards = self._index.take(indices)
        starts = records["offset"]
        stops = (starts + records["length"]).tolist()
        starts = starts.tolist()
        rows: dict[int, list[int]] = {}  # in the order of the batch, so that threads open others
        for row, shard in enumerate(shards.tolist()):
            rows.setdefault(shard, []).append(row)
        payloads: list[np.ndarray] = [_NOTHING] * len(indices)
        most = self.most_open_shards
        for shard, own in rows.items():
            content = self._open.get(shard, self._open_shard, most=most)
            for row in own:
                payloads[row] = content[starts[row] : stops[row]]
            del content  # not in use while the next one waits for room in a cache
        return payloads

    def _open_shard(self, shard: int) -> Content:
        allow_open_files()
        file = self._tar(self.manifest.shards[shard])
        for ahead in list(self._ahead.values()):
            ahead.opened(shard)
        # A view of a map holds it open, of which a batch may have as many as samples; and in a
        # cache of a bounded size.
        evicts = self._remote is not None and self._remote.cache.limit is not None
        if len(self.manifest.shards) > self.most_open_shards or evicts:
            return ShardFile(file)
        with file:
            # Wrap in a plain array: slicing np.memmap is four times slower.
            return np.asarray(np.memmap(file, np.uint8, mode="r"))

    def _tar(self, shard: ShardEntry) -> FileIO:
        if self._remote is None:
            return FileIO(self.directory / shard.name)
        return self._remote.open_shard(shard, when_full=self._make_way)

    def _make_way(self) -> None:
        """Close shards that nobody reads just now, and give up those that are held for later."""
        kept: set[int] = set()
        for ahead in list(self._ahead.values()):
            kept.update(ahead.make_way())
        self._open.keep_only(kept)

    def _valid(self, indices: np.ndarray) -> np.ndarray:
        """Return the index to read for each sample: its own or the next of valid length."""
        if not len(self._wrong):
            return indices.copy()
        places = np.searchsorted(self._wrong, indices).clip(max=len(self._wrong) - 1)
        return np.where(self._wrong[places] == indices, self._in_their_place[places], indices)

    def _find_replacements(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of invalid length, sorted, and the samples to read in their place."""
        bounds = self._index.summaries
        # Lengths between two valid ones are valid, so most shards need not be looked through.
        all_valid = self.codec.valid_lengths(bounds["least_length"])
        all_valid &= self.codec.valid_lengths(bounds["most_length"])
        all_valid &= (bounds["least_offset"] >= 0) & (bounds["end"] <= self._num_bytes)
        of_shards = map(self._wrong_of_shard, np.flatnonzero(~all_valid).tolist())
        wrong = np.concatenate([np.empty(0, np.int64), *of_shards])
        if len(wrong) == len(self):
            raise UserError(f"{self.directory} holds no sample of the right length")
        # The first valid one after a run of wrong ones, each of which is one further than the last.
        ends = np.flatnonzero(np.append(np.diff(wrong) != 1, True)) if len(wrong) else wrong
        after = wrong[ends[np.searchsorted(ends, np.arange(len(wrong)))]] + 1
        if len(wrong) and after[-1] == len(self):
            first = int(after[0]) if wrong[0] == 0 else 0
            after[after == len(self)] = first
        return wrong, after

    def _wrong_of_shard(self, shard: int) -> np.ndarray:
        records = self._index.of_shard(shard)
        offsets, lengths = records["offset"], records["length"]
        inside = (offsets >= 0) & (offsets + lengths <= self._num_bytes[shard])
        wrong = np.flatnonzero(~(self.codec.valid_lengths(lengths) & inside))
        return self._index.first[shard] + wrong

    def _name_skipped(self, index: int, reason: str) -> None:
        name = f"{self.name_of(index)}: {reason}"
        with self._lock:
            if name not in self._skipped_names:
                self._skipped[reason] += 1
                self._skipped_names[name] = None


def _holder(
    remote: RemoteFolder, shards: Sequence[ShardEntry]
) -> Callable[[int, Needed], Held | None]:
    """Return how a shard is fetched ahead; it must not refer to the data set."""

    def hold(shard: int, needed: Needed) -> Held | None:
        return remote.hold(shards[shard], lambda: {shards[each].name for each in needed()})

    return hold


def checked_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """Return indices as int64; raises IndexError if one is outside [0, size)."""
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise IndexError(f"sample indices must lie in [0, {size})")
    return indices


def _check_size(tar: Path, shard: ShardEntry) -> None:
    try:
        num_bytes = tar.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{tar} is missing: write the shards again") from None
    if not os.access(tar, os.R_OK):
        # Found in a step, it would be an error after which launchers start the job again.
        raise UserError(f"{tar} cannot be read: {os.strerror(errno.EACCES)}")
    if num_bytes != shard.num_bytes:
        raise UserError(
            f"{tar} has {num_bytes} bytes where the manifest says {shard.num_bytes}: "
            "it was truncated or changed; delete it and run the command that wrote it again"
        )


def _check_palette(directory: Path, manifest: Manifest) -> None:
    path, identity = directory / PALETTE_NAME, str(manifest.identity)
    try:
        centers = np.load(path, allow_pickle=False)
    except PermissionError as error:
        raise UserError(describe_os_error(error)) from None
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path} is missing or damaged: write the shards again") from None
    digest = hashlib.sha256(centers.astype("<f4").tobytes()).hexdigest()
    if digest != identity:
        raise UserError(
            f"{path} is not the palette that made these shards "
            f"({digest[:12]}..., the manifest says {identity[:12]}...)"
        )


class Subset:
    """Some samples of a data set, in any order, with `indices` int64 `[m]` into it."""

    def __init__(self, dataset: ShardDataset, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices

    @property
    def directory(self) -> Path:
        """The shard folder."""
        return self.dataset.directory

    def __len__(self) -> int:
        return len(self.indices)

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read samples; indices int64 `[b]` refer to the subset. See `ShardDataset.read`."""
        return self.dataset.read(self.indices[indices], positions=positions)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the full data set."""
        return self.dataset.manifest

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, indexed by label."""
        return self.dataset.class_names

    @property
    def labels(self) -> np.ndarray:
        """Labels int64 `[m]`."""
        return self.dataset.labels[self.indices]

    @property
    def skipped(self) -> Counter[str]:
        """Number of replaced samples by reason."""
        return self.dataset.skipped

    @property
    def skipped_names(self) -> list[str]:
        """`shard:key: reason` of each sample replaced so far."""
        return self.dataset.skipped_names

    def order(self, seed: int) -> SampleOrder:
        """Return the training order."""
        return SampleOrder(len(self), seed)


def shuffled(dataset: ShardDataset) -> Subset:
    """Return all samples in an order that depends only on their number, not on a run's seed.

    A prefix then has all classes, even if the folder is sorted by class.
    """
    # Imported here, so that tools that only list or write shards start without torch.
    import torch

    from megavis.parallel.random import uniform

    draws = uniform(torch.arange(len(dataset)), 1, seed=0, purpose="subset")[:, 0]
    return Subset(dataset, draws.argsort(stable=True).numpy())


def representative(
    dataset: ShardDataset, count: int | None, *, announces: bool = False
) -> ShardDataset | Subset:
    """Return a data set whose first `count` images can stand for all of `dataset`.

    `dataset` itself, whose first images are the quickest to read, unless it is sorted by class,
    as shards of others may be: then its first images belong to a few classes, and `count` images
    are drawn at random instead.

    Args:
        count: number of images; None for all.
        announces: whether to say on standard error that images are drawn.
    """
    if count is None or count >= len(dataset):
        return dataset
    labels = dataset.labels
    numbers = np.bincount(labels[labels >= 0])
    # A class to which a random image belongs with probability p is missing with (1 - p)^count.
    expected = (1.0 - (1.0 - numbers / len(dataset)) ** count).sum()
    first = labels[:count]
    if len(np.unique(first[first >= 0])) >= _FEWER * expected:
        return dataset
    if announces:
        sys.stderr.write(
            f"{dataset.directory} is sorted by class: {count:,} of its {len(dataset):,} images are"
            " drawn at random instead of the first ones\n"
        )
    return Subset(dataset, shuffled(dataset).indices[:count])


def halves(dataset: ShardDataset) -> tuple[Subset, Subset]:
    """Return two disjoint halves of the shuffled data set."""
    order = shuffled(dataset).indices
    middle = (len(order) + 1) // 2
    return Subset(dataset, order[:middle]), Subset(dataset, order[middle:])


def subset_per_class(dataset: ShardDataset, count: int, *, seed: int) -> Subset:
    """Return `count` random samples per class. Raises UserError: a class has fewer."""
    return Subset(dataset, sample_per_class(dataset.labels, count, seed=seed))


def sample_per_class(labels: np.ndarray, count: int, *, seed: int, draw: int = 0) -> np.ndarray:
    """Draw indices of `count` samples per class that occurs, without replacement.

    Labels int64 `[b]` of -1 are ignored; `draw` numbers the draws, from 0.

    Raises:
        UserError: a class has fewer.
    """
    random = np.random.default_rng([seed, draw, count])
    chosen = []
    for label in np.unique(labels[labels >= 0]):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise UserError(
                f"class {label} has {len(places)} labelled training images, fewer than {count}"
            )
        chosen.append(random.choice(places, count, replace=False))
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)
