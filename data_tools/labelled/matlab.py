"""Data sets with labels or images in .mat files: SVHN, Flowers-102, Stanford Cars."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.labelled.data_set import TEST, TRAIN, VALIDATION, Listing, image_file, ppm
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

_SVHN_SIDE = 32
_FLOWER_IDS = {TRAIN: "trnid", VALIDATION: "valid", TEST: "tstid"}
_CAR_LISTS = {
    TRAIN: ("cars_train_annos.mat", "cars_train"),
    # The test list in the development kit has no labels.
    TEST: ("cars_test_annos_withlabels.mat", "cars_test"),
}


def list_svhn(root: Path, split: str) -> Listing:
    """List SVHN's cropped digits: `X` uint8 `[32, 32, 3, n]`, `y` from 1, where 10 is digit 0."""
    path = f"{split}_32x32.mat"
    labels = read_mat(root / path, "y").reshape(-1).astype(int)
    if labels.min() < 1 or labels.max() > 10:
        raise UserError(f"{root / path}: labels are in {labels.min()}..{labels.max()}, not 1..10")
    digits = _digits(root / path)
    if digits.dtype != np.uint8 or digits.shape != (_SVHN_SIDE, _SVHN_SIDE, 3, len(labels)):
        raise UserError(
            f"{root / path} has images {digits.dtype} {list(digits.shape)}, not uint8"
            f" [32, 32, 3, {len(labels)}]"
        )
    files = [
        SourceFile(f"{split}/{place:06d}", label, 3 * _SVHN_SIDE**2, path, place)
        for place, label in enumerate((labels % 10).tolist())
    ]
    return Listing([str(digit) for digit in range(10)], files, _read_digit)


def _read_digit(file: SourceFile, root: Path) -> bytes:
    return ppm(_digits(root / file.path)[..., file.offset])


@functools.lru_cache(maxsize=1)
def _digits(path: Path) -> np.ndarray:
    # The file is compressed as a whole, so each process unpacks it once.
    return read_mat(path, "X")


def list_flowers(root: Path, split: str) -> Listing:
    """List Oxford Flowers-102, whose classes are numbered from 1 and have no names."""
    labels = read_mat(root / "imagelabels.mat", "labels").reshape(-1).astype(int)
    numbers = read_mat(root / "setid.mat", _FLOWER_IDS[split]).reshape(-1).astype(int)
    if numbers.min() < 1 or numbers.max() > len(labels):
        raise UserError(
            f"{root / 'setid.mat'} lists images {numbers.min()} to {numbers.max()}, and"
            f" imagelabels.mat labels 1 to {len(labels)}: they belong to different versions"
        )
    files = [
        image_file(root, f"jpg/image_{number:05d}.jpg", label - 1, listed_in="setid.mat")
        for number, label in zip(numbers.tolist(), labels[numbers - 1].tolist(), strict=True)
    ]
    return Listing([str(number) for number in range(1, 103)], files)


def list_cars(root: Path, split: str) -> Listing:
    """List Stanford Cars; test labels are in a separate file, in the kit or next to it."""
    name, folder = _CAR_LISTS[split]
    place = root / "devkit" / name
    if not place.is_file() and (root / name).is_file():
        place = root / name
    rows = np.atleast_1d(read_mat(place, "annotations"))
    if not {"class", "fname"} <= set(rows.dtype.names or ()):
        raise UserError(f"{place} has no 'class' and 'fname' of each car: it is another file")
    files = [
        image_file(root, f"{folder}/{row['fname']}", int(row["class"]) - 1, listed_in=name)
        for row in rows
    ]
    names = read_mat(root / "devkit" / "cars_meta.mat", "class_names")
    return Listing([str(name) for name in np.atleast_1d(names)], files)


def read_mat(path: Path, name: str) -> Any:
    """Return one variable of a .mat file (version 5), with dimensions of size 1 removed."""
    from scipy.io import loadmat

    try:
        return loadmat(path, squeeze_me=True, variable_names=[name])[name]
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except KeyError:
        raise UserError(f"{path} has no {name!r}: it is another file") from None
    except Exception as error:  # scipy raises almost any exception on damaged bytes
        raise UserError(f"{path} cannot be read: {error}") from None
