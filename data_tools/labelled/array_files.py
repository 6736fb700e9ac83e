"""Data sets stored as arrays: dSprites, smallNORB and PatchCamelyon; .mat files of others.

The first three are tasks of VTAB, which splits dSprites and smallNORB by the order in which
TensorFlow Datasets stores them. Here the SHA-256 of an image's index determines the split, in the
same proportions. SVHN, Flowers-102 and Stanford Cars have labels or images in .mat files.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.labelled.data_set import (
    TEST,
    TRAIN,
    VALIDATION,
    Listing,
    hdf5_array,
    image_file,
    ppm,
    read_whole,
)
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

_SPRITE_SIDE, _NORB_SIDE, _TISSUE_SIDE = 64, 96, 96
_NORB_FILES = {
    TRAIN: "smallnorb-5x46789x9x18x6x2x96x96-training",
    TEST: "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_NORB_TYPES: dict[int, np.dtype[Any]] = {507333717: np.dtype("u1"), 507333716: np.dtype("<i4")}
_TISSUE_FILES = {TRAIN: "train", VALIDATION: "valid", TEST: "test"}


def list_dsprites_location(root: Path, split: str) -> Listing:
    """List dSprites by horizontal position, 32 positions in 16 classes."""
    return _list_dsprites(root, split, column=4, count=32)


def list_dsprites_orientation(root: Path, split: str) -> Listing:
    """List dSprites by orientation, 40 orientations in 16 classes."""
    return _list_dsprites(root, split, column=3, count=40)


def _list_dsprites(root: Path, split: str, *, column: int, count: int) -> Listing:
    """List dSprites: in order of SHA-256, 80 % are for training, 10 % for validation."""
    latents, pictures = _array(root, "latents_classes"), _array(root, "imgs")
    shape = (len(latents), _SPRITE_SIDE, _SPRITE_SIDE)
    if latents.ndim != 2 or latents.shape[1] != 6 or pictures.shape != shape:
        raise UserError(
            f"{root}: latents_classes.npy {list(latents.shape)} and imgs.npy"
            f" {list(pictures.shape)} are not [n, 6] and [n, 64, 64]"
        )
    labels = latents[:, column].astype(int) * 16 // count
    places = _share(len(latents), split, {TRAIN: (0, 8), VALIDATION: (8, 9), TEST: (9, 10)})
    files = [
        SourceFile(f"{place:06d}", int(labels[place]), _SPRITE_SIDE**2, "imgs.npy", place)
        for place in places
    ]
    return Listing([str(number) for number in range(16)], files, _read_sprite)


def _read_sprite(file: SourceFile, root: Path) -> bytes:
    return ppm(_grey(255 * _array(root, "imgs")[file.offset]))


@functools.lru_cache(maxsize=2)
def _array(root: Path, name: str) -> np.ndarray:
    path = root / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read: unzip the .npz file of dSprites here") from None


def list_norb_azimuth(root: Path, split: str) -> Listing:
    """List smallNORB by azimuth, 18 classes 20° apart."""
    return _list_norb(root, split, lambda info: info[:, 2] // 2, [f"{20 * k}°" for k in range(18)])


def list_norb_elevation(root: Path, split: str) -> Listing:
    """List smallNORB by elevation, 9 classes from 30°, 5° apart."""
    return _list_norb(root, split, lambda info: info[:, 1], [f"{30 + 5 * k}°" for k in range(9)])


def _list_norb(
    root: Path, split: str, label: Callable[[np.ndarray], np.ndarray], names: Sequence[str]
) -> Listing:
    """List the left camera's images; half of the published test set is for validation."""
    prefix = _NORB_FILES[TRAIN if split == TRAIN else TEST]
    path = f"{prefix}-dat.mat"
    start, pictures = _matrix(root / path)
    _, info = _matrix(root / f"{prefix}-info.mat")
    if pictures.shape != (len(info), 2, _NORB_SIDE, _NORB_SIDE) or info.shape[1:] != (4,):
        raise UserError(f"{root / path} and its info.mat do not match")
    labels = label(info).tolist()
    halves = {TRAIN: (0, 2), VALIDATION: (0, 1), TEST: (1, 2)}
    length = _NORB_SIDE**2
    files = [
        SourceFile(f"{prefix}/{place:05d}", labels[place], length, path, start + 2 * place * length)
        for place in _share(len(info), split, halves)
    ]
    return Listing(names, files, _read_norb)


def _read_norb(file: SourceFile, root: Path) -> bytes:
    content = read_whole(file, root)
    return ppm(_grey(np.frombuffer(content, np.uint8).reshape(_NORB_SIDE, _NORB_SIDE)))


def _matrix(path: Path) -> tuple[int, np.ndarray]:
    """Return the offset of the data in one of NORB's files, and the array.

    The header has a type, the number of dimensions and at least three dimensions, int32 each.
    """
    try:
        head = np.fromfile(path, "<i4", 8)
        kind, count = _NORB_TYPES[int(head[0])], int(head[1])
        start = 8 + 4 * max(3, count)
        return start, np.memmap(path, kind, "r", start, tuple(head[2 : 2 + count].tolist()))
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, KeyError, IndexError, ValueError):
        raise UserError(
            f"{path} is missing, truncated, or not an unpacked smallNORB file"
        ) from None


def list_camelyon(root: Path, split: str) -> Listing:
    """List PatchCamelyon by whether there is a tumour in the center."""
    name = _TISSUE_FILES[split]
    labels = np.asarray(_tissue(root, name, "y")).reshape(-1).astype(int).tolist()
    pictures = _tissue(root, name, "x")
    shape = (len(labels), _TISSUE_SIDE, _TISSUE_SIDE, 3)
    if pictures.shape != shape:
        raise UserError(f"{root}: images of {name} are {list(pictures.shape)}, not {list(shape)}")
    files = [
        SourceFile(f"{name}/{place:06d}", label, 3 * _TISSUE_SIDE**2, name, place)
        for place, label in enumerate(labels)
    ]
    return Listing(["no tumour", "tumour"], files, _read_tissue)


def _read_tissue(file: SourceFile, root: Path) -> bytes:
    return ppm(np.asarray(_tissue(root, file.path, "x")[file.offset], np.uint8))


def _tissue(root: Path, name: str, kind: str) -> Any:
    path = root / f"camelyonpatch_level_2_split_{name}_{kind}.h5"
    return hdf5_array(path, kind, wanted="an unpacked file of PatchCamelyon")


def _share(count: int, split: str, shares: Mapping[str, tuple[int, int]]) -> list[int]:
    """Return the indices of a split, in order of the SHA-256 of their text."""
    first, last = shares[split]
    parts = max(end for _, end in shares.values())
    order = sorted(range(count), key=lambda place: hashlib.sha256(b"%d" % place).digest())
    return order[count * first // parts : count * last // parts]


def _grey(pixels: np.ndarray) -> np.ndarray:
    """Repeat one channel `[h, w]` to uint8 `[h, w, 3]`."""
    return np.repeat(pixels.astype(np.uint8)[..., None], 3, axis=-1)


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
