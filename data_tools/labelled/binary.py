"""CIFAR and STL-10: binary files of fixed-size records, and CIFAR's Python version.

The Python version consists of pickles, which may name any function to be called. Those of CIFAR
name three, which build an array; reading fails on any other name.
"""

from __future__ import annotations

import functools
import io
import pickle  # noqa: S403  # only through `_ArraysOnly`
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_tools.labelled.data_set import TEST, TRAIN, UNLABELED, Listing, ppm, read_whole
from data_tools.sources import SourceFile
from data_tools.user_text import read_lines
from megavis.config.errors import UserError

_CIFAR_SIDE, _STL_SIDE = 32, 96
CIFAR10_BATCHES = {TRAIN: [f"data_batch_{number}" for number in range(1, 6)], TEST: ["test_batch"]}
CIFAR100_BATCHES = {TRAIN: ["train"], TEST: ["test"]}


def list_cifar10(root: Path, split: str) -> Listing:
    """List CIFAR-10, binary version (a label, then 3072 pixels) or Python version."""
    batches = CIFAR10_BATCHES[split]
    if not (root / f"{batches[0]}.bin").is_file() and (root / batches[0]).is_file():
        return list_pickled(root, batches, labels="labels", meta="batches.meta:label_names")
    return _list_cifar(root, batches, num_labels=1, names="batches.meta.txt")


def list_cifar100(root: Path, split: str) -> Listing:
    """List CIFAR-100 with its 100 fine labels, binary version (coarse, fine) or Python version."""
    batches = CIFAR100_BATCHES[split]
    if not (root / f"{batches[0]}.bin").is_file() and (root / batches[0]).is_file():
        return list_pickled(root, batches, labels="fine_labels", meta="meta:fine_label_names")
    return _list_cifar(root, batches, num_labels=2, names="fine_label_names.txt")


def _list_cifar(root: Path, batches: list[str], *, num_labels: int, names: str) -> Listing:
    files = [file for batch in batches for file in _cifar_batch(root, batch, num_labels)]
    return Listing(read_lines(root / names), files, _read_cifar)


def _cifar_batch(root: Path, batch: str, num_labels: int) -> Iterator[SourceFile]:
    path, length = f"{batch}.bin", 3 * _CIFAR_SIDE**2
    records = _records(root / path, num_labels + length)
    # The last label is the finer one.
    for place, label in enumerate(records[:, num_labels - 1].tolist()):
        offset = place * records.shape[1] + num_labels
        yield SourceFile(f"{batch}/{place:05d}", label, length, path, offset)


def list_stl10(root: Path, split: str) -> Listing:
    """List STL-10: column-major pixels in `train_X.bin`, labels from 1 in `train_y.bin`."""
    path, length = f"{split}_X.bin", 3 * _STL_SIDE**2
    count = len(_records(root / path, length))
    labels = [-1] * count
    if split != UNLABELED:
        labels = (_records(root / f"{split}_y.bin", 1)[:, 0].astype(int) - 1).tolist()
    if len(labels) != count:
        raise UserError(f"{root / path} has {count} images, {split}_y.bin {len(labels)} labels")
    files = [
        SourceFile(f"{split}/{place:06d}", label, length, path, place * length)
        for place, label in enumerate(labels)
    ]
    return Listing(read_lines(root / "class_names.txt"), files, _read_stl)


def _records(path: Path, length: int) -> np.ndarray:
    """Return a file as memory-mapped uint8 `[records, length]`."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    size = path.stat().st_size
    if not size or size % length:
        raise UserError(
            f"{path} has {size} bytes, not a multiple of {length}, the size of a record: it"
            " is truncated or another file"
        )
    return np.memmap(path, np.uint8, mode="r").reshape(-1, length)


def _read_cifar(file: SourceFile, root: Path) -> bytes:
    return ppm(_planes(file, root, _CIFAR_SIDE).transpose(1, 2, 0))


def _read_stl(file: SourceFile, root: Path) -> bytes:
    return ppm(_planes(file, root, _STL_SIDE).transpose(2, 1, 0))


def _planes(file: SourceFile, root: Path, side: int) -> np.ndarray:
    """Read uint8 `[3, side, side]`. Raises RefusedImageError and OSError."""
    return np.frombuffer(read_whole(file, root), np.uint8).reshape(3, side, side)


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    # The function that pickled arrays name, at its place in this numpy version.
    ("numpy.core.multiarray", "_reconstruct"): cast(Any, np.empty(0).__reduce__()[0]),
}


def list_pickled(root: Path, batches: list[str], *, labels: str, meta: str) -> Listing:
    """List CIFAR's Python version, with the image names of the binary version.

    `labels` is the key of the labels in each of `batches`, and `meta` file and key of the class
    names, separated by `:`. Raises UserError if a file is damaged or names an unexpected function.
    """
    path, key = meta.split(":")
    names = [name.decode() for name in _value(root / path, key, list)]
    files = []
    for batch in batches:
        numbers = _value(root / batch, labels, list)
        if len(numbers) != len(_pixels(root / batch)):
            raise UserError(f"{root / batch} is damaged: its labels are not as many as its images")
        files += [
            SourceFile(f"{batch}/{place:05d}", int(label), 3 * _CIFAR_SIDE**2, batch, place)
            for place, label in enumerate(numbers)
        ]
    return Listing(names, files, _read)


def _read(file: SourceFile, root: Path) -> bytes:
    planes = _pixels(root / file.path)[file.offset].reshape(3, _CIFAR_SIDE, _CIFAR_SIDE)
    return ppm(planes.transpose(1, 2, 0))


def _pixels(path: Path) -> np.ndarray:
    """Return uint8 `[images, 3072]`."""
    pixels = _value(path, "data", np.ndarray)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * _CIFAR_SIDE**2,):
        raise UserError(f"{path} holds {pixels.dtype} {list(pixels.shape)}, not uint8 [n, 3072]")
    return pixels


def _value(path: Path, key: str, kind: type) -> Any:
    value = _load(path).get(key.encode())
    if not isinstance(value, kind):
        raise UserError(f"{path} has no {key!r}: it is not a file of CIFAR's Python version")
    return value


@functools.lru_cache(maxsize=8)
def _load(path: Path) -> dict[bytes, Any]:
    """Load a Python 2 pickle; cached, since shuffled images come from all files."""
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except Exception as error:  # damaged pickles raise almost any exception
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a file of CIFAR's Python version")
    return content


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UserError(
                f"this pickle calls {module}.{name}, which is not allowed: use the binary"
                " version of CIFAR (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
            )
        return _KNOWN[module, name]
