"""The index of a shard folder: the location of each sample, in one memory-mapped file.

The JSON indexes of the shards are for writing and checking shards: parsed, they take hundreds of
bytes per sample. This file is built from them and takes 16 bytes per sample, and all processes of a
node share its pages. Keys and source names stay in the JSON indexes, and are read on demand.

    header   magic, version, numbers of shards and samples, hash of what it was built from, own hash
    summary  of each shard: bounds of its records, and their SHA-256
    records  of each sample, in the order of the manifest's shards: offset, length, label

Header and summaries are checked when the file is opened, the records of a shard before their first
use: time and memory for opening grow with the number of shards, not of samples.
"""

from __future__ import annotations

import hashlib
import mmap
import shlex
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, sha256_of_file
from megavis.data.format.manifest import Manifest, ShardEntry
from megavis.data.format.shards import ShardIndex, index_path

SAMPLE_INDEX_NAME = "samples.index"
RECORD = np.dtype([("offset", "<i8"), ("length", "<u4"), ("label", "<i4")])
"""A sample: bytes from the start of its tar, bytes of its payload, and class, -1 for none."""
SUMMARY = np.dtype(
    [
        ("num_samples", "<i8"),
        ("num_unlabelled", "<i8"),
        ("least_offset", "<i8"),
        ("end", "<i8"),
        ("least_length", "<u4"),
        ("most_length", "<u4"),
        ("least_label", "<i4"),
        ("most_label", "<i4"),
        ("sha256", "V32"),
    ]
)
"""A shard: bounds over its records (`end`: of offset + length), and the SHA-256 of their bytes."""

_MAGIC, _VERSION = b"megavis\0", 2
# Magic, version, numbers of shards and samples, and two hashes: of the manifest's entries of the
# shards, and of the summaries.
_HEADER = struct.Struct("<8sQQQ32s32s")

Each = Callable[[Callable[[ShardEntry], np.ndarray], Iterable[ShardEntry]], Iterable[np.ndarray]]
"""Applies a function to shards: `map`, or `map` of a process executor."""


class SampleIndex:
    """The mapped index of a shard folder.

    Args:
        json_index: finds the JSON index of a shard, for its keys; default: in the folder.

    Attributes:
        first: the first sample of each shard, int64 `[S + 1]`; the last element is the number of
            samples.
        summaries: summaries of the shards, `SUMMARY` `[S]`.

    Raises:
        UserError: the file is missing, damaged, of an earlier format, or not the manifest's.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        json_index: Callable[[ShardEntry], Path] | None = None,
    ) -> None:
        self._directory, self._shards = directory, manifest.shards
        self._json_index = json_index or (lambda shard: index_path(directory / shard.name))
        self._path = directory / SAMPLE_INDEX_NAME
        try:
            with self._path.open("rb") as file:
                head = file.read(_head_bytes(len(self._shards)))
                self.summaries = self._checked(head, manifest)
                self.first = np.cumsum([0, *self.summaries["num_samples"].tolist()])
                size = index_bytes(len(self._shards), int(self.first[-1]))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise self._complaint("is missing") from None
        if len(self._map) != size:
            raise self._complaint(f"has {len(self._map)} bytes, and {size} are right")
        self._records = np.frombuffer(self._map, RECORD, offset=len(head))
        self._is_checked = np.zeros(len(self._shards), bool)
        self._last_keys: tuple[int, list[str]] = (-1, [])

    def _checked(self, head: bytes, manifest: Manifest) -> np.ndarray:
        if len(head) < _HEADER.size:
            raise self._complaint("is cut short")
        magic, version, num_shards, num_samples, source, own = _HEADER.unpack_from(head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise self._complaint("is damaged or of an earlier format")
        if (num_shards, source) != (len(manifest.shards), source_of(manifest.shards)):
            raise self._complaint("was built from other shards than the manifest's")
        summaries = head[_HEADER.size :]
        if len(head) < _head_bytes(num_shards) or hashlib.sha256(summaries).digest() != own:
            raise self._complaint("is damaged")
        found = np.frombuffer(summaries, SUMMARY)
        if num_samples != manifest.num_samples or num_samples != found["num_samples"].sum():
            raise self._complaint("has other numbers of samples than the manifest")
        return found

    def _complaint(self, what: str) -> UserError:
        command = f"python -m data_tools index {shlex.quote(str(self._directory))}"
        return UserError(f"{self._path} {what}: run `{command}`, which builds it again")

    def shard_of(self, index: int) -> int:
        """Return the shard of a sample."""
        return int(np.searchsorted(self.first, index, side="right")) - 1

    def of_shard(self, shard: int) -> np.ndarray:
        """Return the records of a shard, `RECORD` `[n]`; raises UserError if they are damaged."""
        records = self._records[self.first[shard] : self.first[shard + 1]]
        if not self._is_checked[shard]:
            if hashlib.sha256(records.data).digest() != self.summaries["sha256"][shard].tobytes():
                raise self._complaint(f"is damaged where it lists {self._shards[shard].name}")
            self._is_checked[shard] = True
        return records

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of samples, `RECORD` `[b]`, and their shards, int64 `[b]`."""
        shards = np.searchsorted(self.first, indices, side="right") - 1
        for shard in np.unique(shards[~self._is_checked[shards]]).tolist():
            self.of_shard(shard)
        return self._records[indices], shards

    def release(self, shard: int) -> None:
        """Drop a shard's records from this process's memory; they stay in the page cache."""
        start = len(self._map) - RECORD.itemsize * int(self.first[-1] - self.first[shard])
        start -= start % mmap.PAGESIZE
        stop = len(self._map) - RECORD.itemsize * int(self.first[-1] - self.first[shard + 1])
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def labels(self) -> np.ndarray:
        """Return the labels of all samples, int64 `[N]`."""
        labels = np.empty(self.first[-1], np.int64)
        for shard, (start, stop) in enumerate(zip(self.first, self.first[1:], strict=False)):
            labels[start:stop] = self.of_shard(shard)["label"]
        return labels

    def key(self, index: int) -> str:
        """Return the webdataset key of a sample, from its shard's JSON index.

        Raises OSError, and UserError if that is damaged.
        """
        shard = self.shard_of(index)
        if self._last_keys[0] != shard:
            path = self._json_index(self._shards[shard])
            self._last_keys = shard, ShardIndex.from_json(path.read_bytes(), path=path).keys
        return self._last_keys[1][index - int(self.first[shard])]


def finish_folder(directory: Path, manifest: Manifest, each: Each = map) -> Manifest:
    """Write the index of samples and, last, the manifest, which completes a shard folder.

    Args:
        each: applies a function to every shard, in order; by default in this process.

    Returns the manifest, with the SHA-256 of the index. Raises OSError, and UserError if the JSON
    index of a shard is missing or damaged.
    """
    blocks = each(partial(listed_records, directory), manifest.shards)
    digest = write_sample_index(directory, manifest.shards, blocks)
    finished = manifest.model_copy(update={"index_sha256": digest})
    finished.write(directory)
    return finished


def listed_records(directory: Path, shard: ShardEntry) -> np.ndarray:
    """Return the records of a shard from its JSON index, `RECORD` `[n]`.

    Raises OSError, and UserError if it is missing, damaged or not the manifest's.
    """
    path = index_path(directory / shard.name)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: write the shards again") from None
    if hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise UserError(f"{path} does not have the SHA-256 of the manifest: write the shards again")
    index = ShardIndex.from_json(content, path=path)
    records = np.empty(len(index), RECORD)
    try:
        for name, column in zip(
            RECORD.names or (), (index.offsets, index.lengths, index.labels), strict=True
        ):
            records[name] = np.array(column, RECORD[name])
    except (OverflowError, ValueError, TypeError):
        raise UserError(f"{path} is not a shard index: write the shards again") from None
    return records


def write_sample_index(
    directory: Path, shards: Sequence[ShardEntry], blocks: Iterable[np.ndarray]
) -> str:
    """Write the index of a folder atomically, and return its SHA-256.

    Args:
        blocks: the records of each shard, `RECORD` `[n]`; only one is in memory at a time.

    Raises OSError, UserError if a shard's numbers of records and samples differ, ValueError if the
    numbers of blocks and shards differ, and any exception of `blocks`.
    """
    path = directory / SAMPLE_INDEX_NAME
    summaries = np.zeros(len(shards), SUMMARY)
    with atomic_writer(path) as file:
        file.seek(_head_bytes(len(shards)))
        for number, (shard, records) in enumerate(zip(shards, blocks, strict=True)):
            if len(records) != shard.num_samples:
                found = f"{len(records)} samples in its index, {shard.num_samples} in the manifest"
                raise UserError(f"{directory / shard.name} has {found}: write the shards again")
            summaries[number] = _summary(records)
            file.write(records.data)
        own, source = hashlib.sha256(summaries.data).digest(), source_of(shards)
        total = int(summaries["num_samples"].sum())
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, len(shards), total, source, own))
        file.write(summaries.data)
    return sha256_of_file(path)


def source_of(shards: Sequence[ShardEntry]) -> bytes:
    """Return the SHA-256 of the manifest's entries from which an index is built."""
    digest = hashlib.sha256()
    for shard in shards:
        counts = f"{shard.num_samples} {shard.num_bytes}"
        digest.update(f"{shard.name} {counts} {shard.sha256} {shard.index_sha256}\n".encode())
    return digest.digest()


def _summary(records: np.ndarray) -> tuple[object, ...]:
    """Return the `SUMMARY` of a shard's records."""
    offsets, lengths, labels = (records[name] for name in ("offset", "length", "label"))
    return (
        len(records),
        np.count_nonzero(labels < 0),
        offsets.min(),
        (offsets + lengths).max(),
        lengths.min(),
        lengths.max(),
        labels.min(),
        labels.max(),
        hashlib.sha256(records.data).digest(),
    )


def index_bytes(num_shards: int, num_samples: int) -> int:
    """Return the size of an index in bytes."""
    return _head_bytes(num_shards) + RECORD.itemsize * num_samples


def _head_bytes(num_shards: int) -> int:
    return _HEADER.size + SUMMARY.itemsize * num_shards
