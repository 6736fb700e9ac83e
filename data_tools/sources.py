"""The images of a folder, as an ordered list with labels and an identity."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.decode import RefusedImageError, decode_image
from data_tools.resize import resize_and_crop
from megavis.config.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """One file of an image folder.

    Attributes:
        name: path below the folder, with `/`.
        label: index of its class, or -1.
        num_bytes: size; -1 where it cannot be asked.
    """

    name: str
    label: int
    num_bytes: int


@dataclass(frozen=True)
class ImageFolder:
    """All files of a folder, sorted by name.

    Attributes:
        root: the folder.
        files: one entry a file, images or not: what is none is refused, and counted, later.
        class_names: sorted names of the class folders; a label indexes them.
        sha256: identity of the list of names and sizes.
    """

    root: Path
    files: tuple[SourceFile, ...]
    class_names: tuple[str, ...]
    sha256: str


def list_images(root: Path | str, *, class_names: Sequence[str] | None = None) -> ImageFolder:
    """List the files below `root`; the first folder on the way to a file is its class.

    Files directly in `root` have no class. Hidden files and folders are left out; links are
    followed, each folder once.

    Args:
        root: the image folder.
        class_names: the classes of another data set whose numbering this one shall share.

    Raises:
        UserError: `root` is no folder or is empty, or a class is not among `class_names`.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of images")
    names = sorted(_walk(root))
    if not names:
        raise UserError(f"{root} holds no file: give a folder of images")
    found = sorted({name.split("/")[0] for name in names if "/" in name})
    classes = tuple(found if class_names is None else class_names)
    if unknown := sorted(set(found) - set(classes)):
        raise UserError(f"{root}: class {unknown[0]!r} is not among the {len(classes)} known ones")
    number = {name: label for label, name in enumerate(classes)}
    files = tuple(
        SourceFile(
            name, number.get(name.split("/")[0], -1) if "/" in name else -1, _size(root, name)
        )
        for name in names
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\n".encode("utf-8", "surrogateescape"))
    return ImageFolder(root, files, classes, digest.hexdigest())


def load_square(root: Path, file: SourceFile, *, size: int) -> np.ndarray:
    """Read, decode and resize one file to uint8 `[size, size, 3]`.

    Raises:
        RefusedImageError: it gives no image; the text says why.
    """
    try:
        content = (root / file.name).read_bytes()
    except OSError:
        raise RefusedImageError("unreadable file") from None
    return resize_and_crop(decode_image(content), size=size)


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


def _size(root: Path, name: str) -> int:
    try:
        return (root / name).stat().st_size
    except OSError:
        return -1
