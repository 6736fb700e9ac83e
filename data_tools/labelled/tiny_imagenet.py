"""Tiny ImageNet (`tiny-imagenet-200`): 200 classes of ImageNet at 64².

The authors published no labels for `test`: papers report `val`, which is the test set here.
Training images have the names that reading only the folder `train` would give, so that a split by
hash is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from data_tools.labelled.data_set import TRAIN, UNLABELED, Listing, image_file
from data_tools.sources import SourceFile, list_images
from data_tools.user_text import read_columns, read_lines
from megavis.config.errors import UserError

IDS = "wnids.txt"
ANNOTATIONS = "val_annotations.txt"
_NO_LABEL = "not in the ground truth"


def list_tiny_imagenet(root: Path, split: str) -> Listing:
    """List a split with the classes of `wnids.txt`, sorted as a folder of classes is.

    Raises UserError if a file is missing, or a class is not in `wnids.txt`.
    """
    if not (root / IDS).is_file() and (root / ANNOTATIONS).is_file():
        raise UserError(
            f"{root} holds Tiny ImageNet's validation images without the list of its classes: give"
            f" the folder above, {root.resolve().parent}, with --split test"
        )
    names = sorted(read_lines(root / IDS))
    classes = {name: label for label, name in enumerate(names)}
    if split == TRAIN:
        return Listing(names, _training_files(root, classes))
    if split == UNLABELED:
        return Listing(names, _below(root, "test/images"))
    return Listing(names, _held_out_files(root, classes))


def _training_files(root: Path, classes: Mapping[str, int]) -> list[SourceFile]:
    """List `train/n01443537/images/...`, ignoring the text files of boxes next to them."""
    files = []
    for file in list_images(root / "train").files:
        name = file.name.split("/")[0]
        if name not in classes:
            raise UserError(f"{root / 'train' / name} is not in {IDS}: remove it, or list it there")
        if file.name.startswith(f"{name}/images/"):
            path = f"train/{file.path or file.name}"
            files.append(replace(file, label=classes[name], path=path))
    return files


def _held_out_files(root: Path, classes: Mapping[str, int]) -> list[SourceFile]:
    """List `val/images/...` with the labels of `val_annotations.txt`; others are rejected."""
    listed_in = f"val/{ANNOTATIONS}"
    labels: dict[str, int] = {}
    files = []
    for name, rest in read_columns(root / listed_in, 2):
        wnid = rest.split()[0]
        if wnid not in classes:
            raise UserError(f"{root / listed_in}: {wnid!r}, the class of {name}, is not in {IDS}")
        path = f"val/images/{name}"
        labels[path] = classes[wnid]
        files.append(image_file(root, path, classes[wnid], listed_in=listed_in))
    others = [file for file in _below(root, "val/images") if file.name not in labels]
    # The label of a rejected file is not used, but must name a class.
    return files + [replace(file, label=0, refused=_NO_LABEL) for file in others]


def _below(root: Path, folder: str) -> list[SourceFile]:
    """List a folder of images without labels, by their paths below `root`."""
    return [
        replace(file, name=f"{folder}/{file.name}", path=f"{folder}/{file.path or file.name}")
        for file in list_images(root / folder).files
    ]
