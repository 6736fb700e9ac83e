"""Data sets of image files: with lists of the splits, or one folder per class without splits.

Pets, DTD, Food-101, Aircraft and SUN397 have a text file for each split. Caltech-101, EuroSAT and
RESISC45 have no official splits: here images of each class are split in order of the SHA-256 of
their names, so the split is the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_tools.decode import decode_image
from data_tools.labelled.data_set import (
    TEST,
    TRAIN,
    VALIDATION,
    Listing,
    image_file,
    ppm,
)
from data_tools.sources import SourceFile, list_images
from data_tools.user_text import read_columns, read_lines
from megavis.config.errors import UserError
from megavis.data.format.folders import list_folder

_PETS = {TRAIN: "trainval", TEST: "test"}
_SHORT = {TRAIN: "train", VALIDATION: "val", TEST: "test"}
_SUN_LISTS = {TRAIN: "tr", VALIDATION: "va", TEST: "te"}
_BANNER = 20
"""Height in pixels of the copyright banner at the bottom of each aircraft image."""
_CLUTTER = "BACKGROUND_Google"
_TRAINED_A_CLASS = 30


def list_pets(root: Path, split: str) -> Listing:
    """List Oxford-IIIT Pets: lines `Abyssinian_100 1 1 1` of name, class from 1, species, breed."""
    listed_in = f"annotations/{_PETS[split]}.txt"
    rows = read_columns(root / listed_in, 2)
    numbers = [_number(numbers, root / listed_in) for _, numbers in rows]
    names = {number: row[0].rpartition("_")[0] for number, row in zip(numbers, rows, strict=True)}
    if sorted(names) != list(range(1, len(names) + 1)):
        raise UserError(f"{root / listed_in}: classes are not numbered from 1 to {len(names)}")
    files = [
        image_file(root, f"images/{row[0]}.jpg", number - 1, listed_in=listed_in)
        for number, row in zip(numbers, rows, strict=True)
    ]
    return Listing([names[number] for number in sorted(names)], files)


def _number(text: str, path: Path) -> int:
    try:
        return int(text.split()[0])
    except ValueError:
        raise UserError(f"{path}: {text!r} is not a class number") from None


def list_dtd(root: Path, split: str) -> Listing:
    """List the Describable Textures Dataset, in the first of its ten splits."""
    classes = [entry.name for entry in list_folder(root / "images") if entry.is_dir()]
    return _by_folder(root, f"labels/{_SHORT[split]}1.txt", classes, suffix="")


def list_food(root: Path, split: str) -> Listing:
    """List Food-101: lines `apple_pie/1005649`."""
    return _by_folder(
        root, f"meta/{_SHORT[split]}.txt", read_lines(root / "meta/classes.txt"), suffix=".jpg"
    )


def _by_folder(root: Path, listed_in: str, classes: list[str], *, suffix: str) -> Listing:
    """List images below `images` whose folder is their class."""
    numbers = {name: number for number, name in enumerate(classes)}
    files = []
    for name in read_lines(root / listed_in):
        folder = name.split("/")[0]
        if folder not in numbers:
            raise UserError(f"{root / listed_in}: {name!r} is in none of {len(classes)} classes")
        path = f"images/{name}{suffix}"
        files.append(image_file(root, path, numbers[folder], listed_in=listed_in))
    return Listing(classes, files)


def list_aircraft(root: Path, split: str) -> Listing:
    """List FGVC-Aircraft with its 100 variants: lines `1025794 707-320`."""
    classes = read_lines(root / "data/variants.txt")
    numbers = {name: number for number, name in enumerate(classes)}
    listed_in = f"data/images_variant_{_SHORT[split]}.txt"
    files = []
    for number, variant in read_columns(root / listed_in, 2):
        if variant not in numbers:
            raise UserError(f"{root / listed_in}: {variant!r} is not in data/variants.txt")
        path = f"data/images/{number}.jpg"
        files.append(image_file(root, path, numbers[variant], listed_in=listed_in))
    return Listing(classes, files, _read_without_banner)


def _read_without_banner(file: SourceFile, root: Path) -> bytes:
    return ppm(decode_image(file.read(root))[:-_BANNER])


def list_sun397(root: Path, split: str) -> Listing:
    """List SUN397 in VTAB's split: lines `/a/abbey/sun_aaalbzqrimafwbiv.jpg`.

    The authors' ten partitions have 50 training images per class; VTAB splits all images, in three
    lists that are part of TensorFlow Datasets.
    """
    lists = {part: f"sun397_tfds_{short}.txt" for part, short in _SUN_LISTS.items()}
    missing = [name for name in lists.values() if not (root / name).is_file()]
    if missing:
        raise UserError(
            f"{root / missing[0]} is missing: copy the three lists of VTAB's split there, from"
            " tensorflow_datasets/image_classification"
        )
    names = {part: read_lines(root / name) for part, name in lists.items()}
    classes = sorted(
        {name.rpartition("/")[0].lstrip("/") for part in names.values() for name in part}
    )
    numbers = {name: number for number, name in enumerate(classes)}
    files = [
        image_file(root, name, numbers[name.rpartition("/")[0]], listed_in=lists[split])
        for name in (line.lstrip("/") for line in names[split])
    ]
    return Listing(classes, files)


def list_caltech101(root: Path, split: str) -> Listing:
    """List Caltech-101: 30 images of each of its 101 classes for training, others for testing."""
    return _list_divided(root, split, _by_thirty, leave_out=_CLUTTER)


def list_caltech102(root: Path, split: str) -> Listing:
    """List Caltech-101 with background clutter as an additional class, as in VTAB."""
    return _list_divided(root, split, _by_thirty)


def _by_thirty(place: int, count: int) -> str:
    return TRAIN if place < _TRAINED_A_CLASS else TEST


def list_fifths(root: Path, split: str) -> Listing:
    """List EuroSAT (RGB) or RESISC45 in VTAB's proportions: 60, 20 and 20 % of each class."""

    def belongs(place: int, count: int) -> str:
        if 10 * place < 6 * count:
            return TRAIN
        return VALIDATION if 10 * place < 8 * count else TEST

    return _list_divided(root, split, belongs)


def _list_divided(
    root: Path, split: str, belongs: Callable[[int, int], str], *, leave_out: str = ""
) -> Listing:
    """List a split; `belongs` maps an image's index in its class and the class size to a split."""
    source = list_images(root)
    classes = [name for name in source.class_names if name != leave_out]
    if not classes:
        raise UserError(f"{root} has no class folders")
    chosen: list[SourceFile] = []
    for label, name in enumerate(classes):
        own = (file for file in source.files if file.name.startswith(f"{name}/"))
        ordered = sorted(own, key=lambda file: hashlib.sha256(file.name.encode()).digest())
        for place, file in enumerate(ordered):
            if belongs(place, len(ordered)) == split:
                chosen.append(replace(file, label=label))
    return Listing(classes, chosen)
