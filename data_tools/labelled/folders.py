"""Data sets of one folder a class, left undivided: Caltech-101, EuroSAT, RESISC45.

The division is a function of the names alone: in each class, pictures in the order of the SHA-256
of their names. It is the same on every machine, and no option changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from data_tools.image_folder import list_images
from data_tools.labelled.data_set import TEST, TRAIN, VALIDATION, Listing
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

_CLUTTER = "BACKGROUND_Google"
_TRAINED_A_CLASS = 30


def list_caltech101(root: Path, split: str) -> Listing:
    """List Caltech-101: 30 pictures of each of its 101 classes train, the others test."""
    return _list_divided(root, split, _by_thirty, leave_out=_CLUTTER)


def list_caltech102(root: Path, split: str) -> Listing:
    """List Caltech-101 with its pictures of clutter as a class of their own, as VTAB does."""
    return _list_divided(root, split, _by_thirty)


def _by_thirty(place: int, count: int) -> str:
    return TRAIN if place < _TRAINED_A_CLASS else TEST


def list_fifths(root: Path, split: str) -> Listing:
    """List EuroSAT (RGB) or RESISC45 in VTAB's shares: of each class 60, 20 and 20 %."""

    def belongs(place: int, count: int) -> str:
        if 10 * place < 6 * count:
            return TRAIN
        return VALIDATION if 10 * place < 8 * count else TEST

    return _list_divided(root, split, belongs)


def _list_divided(
    root: Path, split: str, belongs: Callable[[int, int], str], *, leave_out: str = ""
) -> Listing:
    """List a split; `belongs` says which one, of the place of a picture and their number."""
    source = list_images(root)
    classes = [name for name in source.class_names if name != leave_out]
    if not classes:
        raise UserError(f"{root} holds no folder of a class")
    chosen: list[SourceFile] = []
    for label, name in enumerate(classes):
        ordered = _ordered([file for file in source.files if file.name.startswith(f"{name}/")])
        for place, file in enumerate(ordered):
            if belongs(place, len(ordered)) == split:
                chosen.append(SourceFile(file.name, label, file.num_bytes, file.path))
    return Listing(classes, chosen)


def _ordered(files: Sequence[SourceFile]) -> list[SourceFile]:
    return sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
