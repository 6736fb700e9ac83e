"""MNIST and the sets that follow it: idx files of images and labels, gzip-compressed or not.

An idx file is a magic number (two zeros, the type of its values, the number of dimensions), each
dimension as a big-endian uint32, and the values (The MNIST Database of Handwritten Digits).
Fashion-MNIST and KMNIST are published under the same names of files.
"""

from __future__ import annotations

import functools
import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from data_tools.labelled.data_set import TEST, TRAIN, Listing, ppm
from data_tools.sources import SourceFile
from megavis.config.errors import UserError
from megavis.data.format.folders import find_files

_PARTS = {TRAIN: "train", TEST: "t10k"}
_DIMENSIONS = {"images": 3, "labels": 1}
_UNSIGNED_BYTES = 8
TRAIN_IMAGES, TEST_IMAGES = (f"*{part}-images-idx3-ubyte*" for part in _PARTS.values())
"""Patterns of the files of images; copies often have a prefix, such as `mnist_`."""


def list_mnist(root: Path, split: str) -> Listing:
    """List a split of ten numbered classes: grey images of any size, and their labels.

    Raises UserError if a file is missing, damaged, or of another format, or the counts differ.
    """
    part = _PARTS[split]
    pictures, labels = _find(root, part, "images"), _find(root, part, "labels")
    pixels, numbers = _values(pictures, "images"), _values(labels, "labels")
    if not pixels.size:
        raise UserError(f"{pictures} holds no image")
    if len(pixels) != len(numbers):
        raise UserError(
            f"{pictures} has {len(pixels)} images, and {labels.name} has {len(numbers)} labels:"
            " they belong to different sets"
        )
    files = [
        SourceFile(f"{part}/{place:05d}", label, pixels[0].size, pictures.name, place)
        for place, label in enumerate(numbers.tolist())
    ]
    return Listing([str(digit) for digit in range(10)], files, _read_picture)


def _find(root: Path, part: str, kind: str) -> Path:
    """Return the file of a part, under any prefix; the unpacked one if both forms exist."""
    name = f"{part}-{kind}-idx{_DIMENSIONS[kind]}-ubyte"
    found = [*find_files(root, f"*{name}"), *find_files(root, f"*{name}.gz")]
    if not found:
        raise UserError(f"{root / name} is missing, and so is {name}.gz")
    if len({path.name.removesuffix(".gz") for path in found}) > 1:
        several = " and ".join(sorted(path.name for path in found))
        raise UserError(f"{root} holds {several}: put each data set into a folder of its own")
    if found[0].name.startswith("emnist"):
        raise UserError(
            f"{found[0]} is EMNIST, whose images are transposed and whose classes differ by part:"
            " only MNIST and sets of its form are read"
        )
    return found[0]


# The file is compressed as a whole, so each process unpacks it once.
@functools.lru_cache(maxsize=2)
def _values(path: Path, kind: str) -> np.ndarray:
    """Return uint8 `[n, h, w]` images or `[n]` labels. Raises UserError."""
    content, dimensions = _content(path), _DIMENSIONS[kind]
    magic = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        raise UserError(
            f"{path} starts with {content[:4].hex() or 'nothing'}, not {magic.hex()}: it is no idx"
            f" file of {kind}"
        )
    start = 4 * (1 + dimensions)
    if len(content) < start:
        raise UserError(
            f"{path} has {len(content)} bytes, fewer than the header of {start}: it is truncated"
        )
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    wanted = start + math.prod(shape)
    if len(content) != wanted:
        sides = f" of {' x '.join(map(str, shape[1:]))} pixels" if shape[1:] else ""
        fault = "truncated" if len(content) < wanted else "damaged"
        raise UserError(
            f"{path} has {len(content)} bytes, not {wanted} as its header says ({shape[0]}"
            f" {kind}{sides}): it is {fault}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytes:
    """Return the unpacked content of a file. Raises UserError, and OSError."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be unpacked: {error}") from None


def _read_picture(file: SourceFile, root: Path) -> bytes:
    grey = _values(root / file.path, "images")[file.offset]
    return ppm(np.repeat(grey[..., None], 3, axis=-1))
