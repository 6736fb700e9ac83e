"""CIFAR and STL-10 as plain binary files: consecutive records of one size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_tools.labelled.data_set import (
    TEST,
    TRAIN,
    UNLABELED,
    Listing,
    ppm,
    read_lines,
)
from data_tools.labelled.pickled import list_pickled
from data_tools.sources import SourceFile
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
    """List STL-10: pixels in `train_X.bin`, labels from 1 in `train_y.bin`; columns come first."""
    path, length = f"{split}_X.bin", 3 * _STL_SIDE**2
    count = len(_records(root / path, length))
    labels = [-1] * count
    if split != UNLABELED:
        labels = (_records(root / f"{split}_y.bin", 1)[:, 0].astype(int) - 1).tolist()
    if len(labels) != count:
        raise UserError(f"{root / path} has {count} pictures and {split}_y.bin {len(labels)}")
    files = [
        SourceFile(f"{split}/{place:06d}", label, length, path, place * length)
        for place, label in enumerate(labels)
    ]
    return Listing(read_lines(root / "class_names.txt"), files, _read_stl)


def _records(path: Path, length: int) -> np.ndarray:
    """Return a file as uint8 `[records, length]`, read where it is looked at.

    Raises:
        UserError: it is missing, empty, or no whole number of records.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    size = path.stat().st_size
    if not size or size % length:
        raise UserError(
            f"{path} has {size} bytes, which is no whole number of records of {length} bytes: it"
            " is cut or another file"
        )
    return np.memmap(path, np.uint8, mode="r").reshape(-1, length)


def _read_cifar(file: SourceFile, root: Path) -> bytes:
    return ppm(_planes(file, root, _CIFAR_SIDE).transpose(1, 2, 0))


def _read_stl(file: SourceFile, root: Path) -> bytes:
    return ppm(_planes(file, root, _STL_SIDE).transpose(2, 1, 0))


def _planes(file: SourceFile, root: Path, side: int) -> np.ndarray:
    """Return uint8 `[3, side, side]`. Raises OSError where the file ends in it."""
    content = file.read(root)
    if len(content) < file.num_bytes:
        raise OSError(f"{file.path} was cut")
    return np.frombuffer(content, np.uint8).reshape(3, side, side)
