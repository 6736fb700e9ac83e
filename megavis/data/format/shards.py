"""A shard: a plain webdataset tar with a JSON index for random access.

The tar holds one member per sample, such as `<key>.tok` for palette tokens. webdataset's TarWriter
writes it, with times and owners of zero, so equal samples give equal bytes. We add three things for
which it has no options: offsets, computed from the end of the tar after each member (headers of any
length, such as PAX headers of long names, precede it); removal of the padding to a record of 10,240
bytes beyond the two blocks that end a tar; and a SHA-256 computed while writing. Labels are stored
in the index: as tar members they would cost 1,024 bytes each, a third of a 32x32 sample.

Palette tokens have nine bits each: N tokens below 512 become N bytes with the low eight bits of
each token in raster order, followed by ceil(N / 8) bytes with the packed ninth bits, the first
token in the most significant bit. If N is not divisible by 8, the last byte is padded with zero
bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, write_atomically

MAX_TOKENS = 512
INDEX_VERSION = 1
_BLOCK = tarfile.BLOCKSIZE


def payload_bytes(num_tokens: int) -> int:
    """Return the size of `num_tokens` packed tokens in bytes."""
    return num_tokens + (num_tokens + 7) // 8


def pack_tokens(tokens: np.ndarray) -> np.ndarray:
    """Pack `[b, n]` to uint8 `[b, payload_bytes(n)]`; raise ValueError for 512 or more."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= MAX_TOKENS):
        raise ValueError(f"tokens must lie in [0, {MAX_TOKENS})")
    tokens = tokens.astype(np.uint16, copy=False)
    low = (tokens & 0xFF).astype(np.uint8)
    high = np.packbits((tokens >> 8).astype(np.uint8), axis=1)
    return np.concatenate([low, high], axis=1)


def unpack_tokens(payload: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """Unpack uint8 `[b, payload_bytes(n)]` to uint16 `[b, n]`, or raise ValueError."""
    if payload.shape[1] != payload_bytes(num_tokens):
        raise ValueError(
            f"{num_tokens} tokens take {payload_bytes(num_tokens)} bytes, not {payload.shape[1]}"
        )
    tokens = payload[:, :num_tokens].astype(np.uint16)
    high = np.unpackbits(payload[:, num_tokens:], axis=1, count=num_tokens).astype(np.uint16)
    tokens |= high << 8
    return tokens


@dataclass
class ShardIndex:
    """Location of each sample in one tar, and the source files that were rejected.

    Attributes:
        shard: file name of the tar.
        job: identity of the job that made it; a rerun keeps a shard only if this is equal.
        num_bytes, sha256: size and hash of the tar.
        keys, offsets, lengths, labels, sources: one entry per sample; offsets are bytes from the
            start of the tar.
        skipped: `[source name, reason]` of each rejected source file.
        unread: number of members of source tars that were not read, by suffix; left out of the
            file if there are none.
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
    unread: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def to_json(self) -> bytes:
        """Return the bytes of the index file."""
        values = {"index_version": INDEX_VERSION, **asdict(self)}
        if not self.unread:
            del values["unread"]
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, *, path: Path) -> ShardIndex:
        """Parse an index file; errors name `path`. Raises UserError for other content."""
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
    """Return the path of a tar's index."""
    return shard.with_name(f"{shard.stem}.index.json")


class ShardWriter:
    """Writes a tar and collects its index; created by `open_shard`."""

    def __init__(self, file: BinaryIO, index: ShardIndex, *, suffix: str) -> None:
        # Imported here, since readers do not need it.
        from webdataset import TarWriter

        self.index = index
        self._suffix = suffix
        self._file = _HashedStart(file)
        self._tar = TarWriter(
            self._file, encoder=False, compress=False, user="", group="", mode=0o644, mtime=0
        )

    def add(self, key: str, payload: bytes, *, label: int, source: str) -> None:
        """Write one sample.

        Args:
            key: webdataset key: unique in the data set, without dots or slashes.

        Raises:
            ValueError: the key is empty or contains a dot or a slash.
            OSError: writing fails.
        """
        if "." in key or "/" in key or not key:
            raise ValueError(f"key {key!r} must be non-empty, without dots and slashes")
        stream, length = self._tar.tarstream, len(payload)
        self._tar.write({"__key__": key, self._suffix: payload})
        stream.members.clear()  # otherwise it keeps them all
        index = self.index
        index.keys.append(key)
        index.offsets.append(stream.offset - length - -length % _BLOCK)
        index.lengths.append(length)
        index.labels.append(int(label))
        index.sources.append(source)

    def finish(self) -> None:
        """Write the end of the tar and complete the index. Raises OSError."""
        self._file.end = self._tar.tarstream.offset + 2 * _BLOCK
        self._tar.close()
        self.index.num_bytes, self.index.sha256 = self._file.end, self._file.digest.hexdigest()

    def discard(self) -> None:
        """Stop writing, and drop bytes that the tar's stream still buffers."""
        self._file.end = 0


class _HashedStart:
    """A file that keeps the bytes before `end`, and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._written = file, 0
        self.digest, self.end = hashlib.sha256(), sys.maxsize

    def write(self, content: bytes) -> None:
        kept = content[: max(self.end - self._written, 0)]
        self._written += len(kept)
        if kept:
            self._file.write(kept)
            self.digest.update(kept)


@contextmanager
def open_shard(path: Path, *, job: str, suffix: str) -> Iterator[ShardWriter]:
    """Open a tar for writing that appears under `path` only if the block succeeds.

    The writer's `index` is then complete but not yet written: the caller adds the skipped files
    and calls `write_index`. A tar without an index is therefore unfinished.

    Args:
        job: identity of the job that makes it.
        suffix: suffix of the member names, as declared by the codec: `tok`, `jpg`, `lat`, `ids`.

    Raises:
        OSError: writing fails.
    """
    with atomic_writer(path) as file:
        writer = ShardWriter(file, ShardIndex(shard=path.name, job=job), suffix=suffix)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.discard()
            raise


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index next to its tar, atomically. Raises OSError."""
    write_atomically(index_path(shard), index.to_json())


class ShardReader:
    """Memory-mapped random access to one shard; raise UserError if it is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path_of_index = index_path(path)
        try:
            self.index = ShardIndex.from_json(path_of_index.read_bytes(), path=path_of_index)
        except FileNotFoundError:
            raise UserError(f"{path_of_index} is missing: write the shards again") from None

    def __len__(self) -> int:
        return len(self.index)

    def open_map(self) -> np.ndarray:
        """Return the tar as a read-only memory map, uint8 `[num_bytes]`."""
        return map_file(self.path)

    def read(self, number: int) -> np.ndarray:
        """Return the payload of one sample as uint8 `[length]`."""
        start, length = self.index.offsets[number], self.index.lengths[number]
        return self.open_map()[start : start + length]


def map_file(path: Path) -> np.ndarray:
    """Memory-map a file as a read-only uint8 array. Raises UserError if that fails."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
