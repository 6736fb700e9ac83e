"""An image folder as a source; folder names give the classes.

The first folder on the path to a file is its class. Classes are numbered in order of their names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_tools.sources import FileSource, SourceFile, printable
from megavis.config.errors import UserError

_NOT_REGULAR = "not a regular file"


def list_images(root: Path | str, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List the files below `root`; the first folder on the path to a file is its class.

    Files directly in `root` have no class. Hidden files and folders are skipped; links are
    followed, but each folder is visited once. With `class_names` of another data set, its numbering
    is used. Raises UserError if `root` is not a folder or is empty, or a class is not among them.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of images")
    files = [_file_of(root, raw) for raw in _walk(root)]
    if not files:
        raise UserError(f"{root} has no files: give a folder of images")
    return label_by_folder(
        files, description=f"image folder {root.name}", root=root, class_names=class_names
    )


def label_by_folder(
    files: Sequence[SourceFile],
    *,
    description: str,
    root: Path,
    class_names: Sequence[str] | None = None,
) -> FileSource:
    """Return a source of files whose class is the first folder of their name, if any.

    Classes are numbered in order of their names, or as in `class_names`, those of another data set;
    a class that is not among them raises UserError.
    """
    classes = [file.name.split("/")[0] if "/" in file.name else "" for file in files]
    number = number_classes(sorted(set(classes) - {""}), class_names, root=root)
    labelled = (
        replace(file, label=number.get(name, -1)) for file, name in zip(files, classes, strict=True)
    )
    return FileSource.of(labelled, description=description, root=root, classes=list(number))


def number_classes(
    found: Sequence[str], known: Sequence[str] | None, *, root: Path
) -> dict[str, int]:
    """Return the number of each class: its index in `known`, or in `found` if that is None.

    Raises UserError if a found class is not known.
    """
    classes = found if known is None else known
    if unknown := sorted(set(found) - set(classes)):
        raise UserError(f"{root}: class {unknown[0]!r} is not among the {len(classes)} known ones")
    return {name: label for label, name in enumerate(classes)}


def _walk(root: Path) -> Iterator[str]:
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _file_of(root: Path, raw: str) -> SourceFile:
    name = printable(raw)
    path = "" if name == raw else raw
    try:
        status = (root / raw).stat()
    except OSError:
        return SourceFile(name, -1, -1, path)  # reading it will fail and be counted
    # Opening a pipe would block forever.
    refused = "" if stat.S_ISREG(status.st_mode) else _NOT_REGULAR
    return SourceFile(name, -1, status.st_size, path, refused=refused)
