"""The index of a shard folder: where each sample lies, as columns in one file that is mapped.

The JSON indexes of the shards are for those who write and check shards: parsed, they take hundreds
of bytes a sample. A mapped file takes none, and all processes of a node share its pages. Columns
follow each other, in the order of the manifest's shards: offset and length (int64), end of the key
in the last column (int64), label (int32), keys (UTF-8).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, sha256_of_file
from megavis.data.format.manifest import Manifest, ShardEntry
from megavis.data.format.shards import ShardIndex, index_path

SAMPLE_INDEX_NAME = "samples.index"
_WIDE, _NARROW = np.dtype("<i8"), np.dtype("<i4")


class SampleIndex:
    """The mapped index of a shard folder.

    Attributes:
        offsets: bytes from the start of the shard, int64 `[N]`.
        lengths: bytes of the payload, int64 `[N]`.
        labels: int32 `[N]`, -1 for a sample without a label.

    Raises:
        UserError: the file is missing, damaged, or not the manifest's.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        path, count = directory / SAMPLE_INDEX_NAME, manifest.num_samples
        try:
            digest = sha256_of_file(path)
        except FileNotFoundError:
            raise UserError(f"{path} is missing: write the shards again") from None
        if digest != manifest.index_sha256:
            raise UserError(f"{path} does not have the SHA-256 of the manifest")
        # Slicing np.memmap is four times slower than slicing a plain array.
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        places = _places(count)
        self.offsets, self.lengths, self._key_ends = (
            content[place : place + _WIDE.itemsize * count].view(_WIDE) for place in places[:3]
        )
        self.labels = content[places[3] : places[4]].view(_NARROW)
        self._keys = content[places[4] :]

    def key(self, index: int) -> str:
        """Return the webdataset key of a sample."""
        start = int(self._key_ends[index - 1]) if index else 0
        return self._keys[start : int(self._key_ends[index])].tobytes().decode()


def finish_folder(directory: Path, manifest: Manifest) -> Manifest:
    """Write the index of samples and, last, the manifest, which finishes a shard folder.

    Returns the manifest, with the SHA-256 of the index. Raises OSError, and UserError if the JSON
    index of a shard is missing or damaged.
    """
    digest = _write(directory, manifest.shards)
    finished = manifest.model_copy(update={"index_sha256": digest})
    finished.write(directory)
    return finished


def _write(directory: Path, shards: Sequence[ShardEntry]) -> str:
    path = directory / SAMPLE_INDEX_NAME
    places = _places(sum(shard.num_samples for shard in shards))
    done = passed = 0
    with atomic_writer(path) as file:
        for shard in shards:  # one index in memory at a time
            where = index_path(directory / shard.name)
            index = ShardIndex.from_json(where.read_bytes(), path=where)
            keys = [key.encode() for key in index.keys]
            ends = passed + np.cumsum([len(key) for key in keys], dtype=_WIDE)
            columns: list[np.ndarray] = [
                np.array(index.offsets, _WIDE),
                np.array(index.lengths, _WIDE),
                ends,
                np.array(index.labels, _NARROW),
            ]
            for place, column in zip(places, columns, strict=False):
                file.seek(place + done * column.itemsize)
                file.write(column.tobytes())
            file.seek(places[4] + passed)
            file.write(b"".join(keys))
            done, passed = done + len(index), int(ends[-1])
    return sha256_of_file(path)


def _places(count: int) -> list[int]:
    """Return where the columns of `count` samples begin."""
    sizes = [_WIDE.itemsize, _WIDE.itemsize, _WIDE.itemsize, _NARROW.itemsize]
    return [int(place) * count for place in np.cumsum([0, *sizes])]
