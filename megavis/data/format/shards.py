"""One shard: a plain webdataset tar, and a JSON index next to it for random access.

The tar holds one member a sample, `<key>.tok` for palette tokens. Times and owners are zero, so
the same samples give the same bytes. Labels live in the index: as a tar member each would cost
1,024 bytes, a third of a 32x32 sample.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, write_atomically

INDEX_VERSION = 1
_BLOCK = tarfile.BLOCKSIZE


@dataclass
class ShardIndex:
    """Where each sample of one tar lies, and what was refused on the way.

    Attributes:
        shard: file name of the tar.
        job: identity of the work that made it; a rerun keeps a shard only if it is equal.
        num_bytes, sha256: of the tar.
        keys, offsets, lengths, labels, sources: one entry a sample; bytes are counted from the
            start of the tar.
        skipped: `[source name, reason]` of each source file that gave no sample.
    """

    shard: str
    job: str
    num_bytes: int = 0
    sha256: str = ""
    keys: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    skipped: list[list[str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def to_json(self) -> bytes:
        """Return the bytes of the index file."""
        return json.dumps({"index_version": INDEX_VERSION, **asdict(self)}).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, *, path: Path) -> ShardIndex:
        """Read the bytes of an index file; `path` is named in errors.

        Raises:
            UserError: the bytes are not an index of this version.
        """
        try:
            values: dict[str, Any] = json.loads(content)
            version = values.pop("index_version")
            index = cls(**values)
            columns = (index.offsets, index.lengths, index.labels, index.sources)
            sound = all(len(column) == len(index.keys) for column in columns)
        except (ValueError, TypeError, KeyError, AttributeError):
            sound, version = False, INDEX_VERSION
        if version != INDEX_VERSION or not sound:
            raise UserError(f"{path} is not a shard index: write the shards again")
        return index


def index_path(shard: Path) -> Path:
    """Return the path of the index that belongs to a tar."""
    return shard.with_name(f"{shard.stem}.index.json")


class ShardWriter:
    """Writes a tar member by member and keeps its index; made by `open_shard`."""

    def __init__(self, file: BinaryIO, index: ShardIndex, *, suffix: str) -> None:
        self.index = index
        self._file = file
        self._suffix = suffix
        self._digest = hashlib.sha256()

    def add(self, key: str, payload: bytes, *, label: int, source: str) -> None:
        """Write one sample.

        Args:
            key: webdataset key: unique in the data set, without a dot or a slash.
            payload: the bytes of its member.
            label: class index, or -1.
            source: name of the file that it was made from.

        Raises:
            ValueError: webdataset would split the key.
            OSError: the disk fails.
        """
        if "." in key or "/" in key or not key:
            raise ValueError(f"key {key!r} must be non-empty, without dots and slashes")
        index = self.index
        index.keys.append(key)
        index.offsets.append(index.num_bytes + _BLOCK)
        index.lengths.append(len(payload))
        index.labels.append(int(label))
        index.sources.append(source)
        self._write(_member(f"{key}.{self._suffix}", payload))

    def finish(self) -> None:
        """Write the end of the tar and complete the index. Raises OSError."""
        self._write(bytes(2 * _BLOCK))
        self.index.sha256 = self._digest.hexdigest()

    def _write(self, content: bytes) -> None:
        self.index.num_bytes += self._file.write(content)
        self._digest.update(content)


@contextmanager
def open_shard(path: Path, *, job: str, suffix: str) -> Iterator[ShardWriter]:
    """Open a tar for writing that appears under `path` only when the block ends well.

    The writer's `index` is whole from then on; it is not written: the caller adds what was
    skipped, then calls `write_index`, so a tar without an index is unfinished work.

    Args:
        path: the tar.
        job: identity of the work that makes it.
        suffix: of each member's name, which the codec says: `tok`, `jpg`, `lat`, `ids`.

    Raises:
        OSError: the disk fails.
    """
    with atomic_writer(path) as file:
        writer = ShardWriter(file, ShardIndex(shard=path.name, job=job), suffix=suffix)
        yield writer
        writer.finish()


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index next to its tar, atomically. Raises OSError."""
    write_atomically(index_path(shard), index.to_json())


def _member(name: str, payload: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    padding = bytes(-len(payload) % _BLOCK)
    return info.tobuf(format=tarfile.USTAR_FORMAT) + payload + padding


class ShardReader:
    """Random access to the samples of one shard through a memory map.

    Raises:
        UserError: the tar or its index is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        beside = index_path(path)
        try:
            self.index = ShardIndex.from_json(beside.read_bytes(), path=beside)
        except FileNotFoundError:
            raise UserError(f"{beside} is missing: write the shards again") from None

    def __len__(self) -> int:
        return len(self.index)

    def open_map(self) -> np.ndarray:
        """Return the whole tar as a read-only uint8 `[num_bytes]`, mapped, not loaded."""
        return map_file(self.path)

    def read(self, number: int) -> np.ndarray:
        """Return the payload of one sample as uint8 `[length]`."""
        start, length = self.index.offsets[number], self.index.lengths[number]
        return self.open_map()[start : start + length]


def map_file(path: Path) -> np.ndarray:
    """Return a file as a read-only uint8 array. Raises UserError if it cannot be mapped."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
