"""One shard: a plain webdataset tar, and a JSON index beside it for random access.

The tar holds one `<key>.tok` member a sample. Times and owners are zero, so the same samples give
the same bytes. Labels live in the index: as a tar member each would cost 1,024 bytes, a third of
a 32x32 sample.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megavis.config.errors import UserError
from megavis.data.bits import pack_tokens, unpack_tokens
from megavis.data.files import atomic_writer, write_atomically

INDEX_VERSION = 1
TOKEN_SUFFIX = "tok"
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Sample:
    """One sample on its way into a shard.

    Attributes:
        key: webdataset key: unique in the data set, without a dot or a slash.
        tokens: ids `[n]` in [0, 512), raster order.
        label: class index, or -1.
        source: name of the file that it was made from.
    """

    key: str
    tokens: np.ndarray
    label: int
    source: str


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


def write_shard(path: Path, samples: Iterable[Sample], *, job: str) -> ShardIndex:
    """Write a tar; it appears under `path` whole or not at all.

    The index is returned, not written: the caller adds what was skipped, then calls
    `write_index`, so a tar without an index is unfinished work. Raises OSError, and ValueError
    for a key that webdataset would split.
    """
    index = ShardIndex(shard=path.name, job=job)
    digest = hashlib.sha256()
    with atomic_writer(path) as file:
        for sample in samples:
            payload = pack_tokens(sample.tokens[None]).tobytes()
            index.keys.append(sample.key)
            index.offsets.append(index.num_bytes + _BLOCK)
            index.lengths.append(len(payload))
            index.labels.append(int(sample.label))
            index.sources.append(sample.source)
            member = _member(sample.key, payload)
            index.num_bytes += file.write(member)
            digest.update(member)
        end = bytes(2 * _BLOCK)
        index.num_bytes += file.write(end)
        digest.update(end)
    index.sha256 = digest.hexdigest()
    return index


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index beside its tar, whole or not at all. Raises OSError."""
    write_atomically(index_path(shard), index.to_json())


def _member(key: str, payload: bytes) -> bytes:
    if "." in key or "/" in key or not key:
        raise ValueError(f"key {key!r} must be non-empty, without dots and slashes")
    info = tarfile.TarInfo(f"{key}.{TOKEN_SUFFIX}")
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

    def read(self, number: int, *, num_tokens: int) -> np.ndarray:
        """Return the tokens of one sample as uint16 `[num_tokens]`.

        Raises:
            ValueError: its payload does not have the length of `num_tokens` tokens.
        """
        start, length = self.index.offsets[number], self.index.lengths[number]
        payload = self.open_map()[start : start + length]
        return unpack_tokens(payload[None], num_tokens=num_tokens)[0]


def map_file(path: Path) -> np.ndarray:
    """Return a file as a read-only uint8 array. Raises UserError if it cannot be mapped."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
