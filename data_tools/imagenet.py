"""ILSVRC2012 as distributed: the tar of tars, and the flat validation set.

Names are the same in every layout (`n01440764/n01440764_10026.JPEG`), so a tar and a folder with
the same images give the same shards. Validation images are identified by number only; their labels
are converted to names of synsets (`n01440764`), and a label is the index of its synset among the
sorted names, as in the folders of the training set.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from data_tools.ground_truth import GroundTruth
from data_tools.sources import (
    CUT_OFF,
    FileSource,
    SourceFile,
    errors_named,
    label_by_folder,
    list_images,
    number_classes,
    printable,
)
from data_tools.tars import BrokenTarError, Stretch, tar_members, why_not
from megavis.config.errors import UserError
from megavis.data.format.folders import Contents

VALIDATION_START = "ILSVRC2012_val_"
_NO_LABEL = "not in the ground truth"
_NO_CLASS_TAR = "not the tar of a class"
_CLASS_TAR = re.compile(r"n\d{8}\.tar")
_WHOLE_FILE = "."  # the root of a source in one tar is that tar


def train_tar(path: Path, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List `ILSVRC2012_img_train.tar`, a tar with one tar per class, or a folder of these tars.

    Nothing is unpacked. Every header is read once (one seek per image); images are later read at
    their offsets. A damaged class tar yields the images before the damage, and is reported. Raises
    UserError and OSError.
    """
    files = list(_class_tars(path) if path.is_dir() else _tar_of_tars(path))
    folders = {file.name.split("/")[0] for file in files if "/" in file.name}
    if not folders:
        raise UserError(f"{path} has no class tars such as n01440764.tar")
    return label_by_folder(
        files,
        description=f"ImageNet train tar {path.name}",
        root=path,
        folders=folders,
        class_names=class_names,
    )


def are_class_tars(names: Sequence[str]) -> bool:
    """Return whether every tar is named after a class of ImageNet, such as `n01440764.tar`."""
    return all(map(_CLASS_TAR.fullmatch, names))


def _tar_of_tars(path: Path) -> Iterator[SourceFile]:
    with errors_named(path), path.open("rb") as file:
        try:
            for outer in tar_members(file):
                yield from _class_tar(file, outer)
        except BrokenTarError as error:
            yield SourceFile(path.name, -1, 0, _WHOLE_FILE, refused=str(error))


def _class_tars(folder: Path) -> Iterator[SourceFile]:
    """Yield the images of the class tars in a folder, with the names that the outer tar gives."""
    for name in Contents.of(folder).tars:
        with errors_named(folder / name), (folder / name).open("rb") as file:
            outer = tarfile.TarInfo(name)
            outer.size, outer.offset_data = os.fstat(file.fileno()).st_size, 0
            for picture in _class_tar(file, outer):
                yield replace(picture, path=name)


def _class_tar(file: BinaryIO, outer: tarfile.TarInfo) -> Iterator[SourceFile]:
    """Yield the images of one class tar, which lies in another file."""
    name, suffix = os.path.splitext(outer.name.split("/")[-1])
    if suffix != ".tar" or not outer.isreg():
        yield SourceFile(printable(outer.name), -1, outer.size, _WHOLE_FILE, refused=_NO_CLASS_TAR)
        return
    inner = cast(BinaryIO, Stretch(file, start=outer.offset_data, length=outer.size))
    try:
        for member in tar_members(inner):
            whole = member.offset_data + member.size <= outer.size
            picture = _member(member, folder=f"{name}/", start=outer.offset_data)
            yield picture.but_refused("" if whole else CUT_OFF)
    except BrokenTarError as error:
        refused = str(error)
        yield SourceFile(
            printable(f"{name}/{name}.tar"), -1, outer.size, _WHOLE_FILE, refused=refused
        )


def _member(member: tarfile.TarInfo, *, folder: str = "", start: int = 0) -> SourceFile:
    return SourceFile(
        printable(folder + member.name.split("/")[-1]),
        -1,
        member.size,
        _WHOLE_FILE,
        start + member.offset_data,
        why_not(member),
    )


def validation(
    root: Path, *, truth: GroundTruth, class_names: Sequence[str] | None = None
) -> FileSource:
    """List the flat validation set, a tar or a folder, with labels from its ground truth.

    `class_names` are the training set's, if they differ from `truth`'s. Raises
    UserError if a class is not among them or the ground truth does not match the images, and
    OSError.
    """
    known = truth.class_names if class_names is None else class_names
    files = flat_files(root).files
    classes = truth.classes_of([file.name for file in files], root=root)
    if not classes:
        raise UserError(f"no image of {root} is in the ground truth {truth.path}")
    number = number_classes(sorted(set(classes.values())), known, root=truth.path)
    labelled = (
        replace(file, label=number[classes[file.name]])
        if file.name in classes
        else file.but_refused(_NO_LABEL)
        for file in files
    )
    return FileSource.of(
        labelled,
        description=f"ImageNet validation set {root.name}",
        root=root,
        classes=list(number),
        # Labels are part of the identity, which otherwise has only names and sizes.
        extra=" ".join(name for _, name in sorted(classes.items())),
    )


def flat_files(root: Path) -> FileSource:
    """List the flat validation set, a tar or a folder, without labels."""
    if root.is_dir():
        return list_images(root)
    description = f"ImageNet validation tar {root.name}"
    return FileSource.of(_flat_tar(root), description=description, root=root, classes=())


def _flat_tar(path: Path) -> Iterator[SourceFile]:
    with errors_named(path), path.open("rb") as file:
        try:
            for member in tar_members(file):
                yield _member(member)
        except BrokenTarError as error:
            yield SourceFile(path.name, -1, 0, _WHOLE_FILE, refused=str(error))
