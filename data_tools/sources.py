"""Where pictures come from: a source is cut into parts, and a part hands out file contents.

A part is what one unit of work reads. It is small, travels to other processes, and opens files
only there. `FileSource` is a list of files that is shuffled and cut into slices; its files may lie
in a folder or, by offset, inside a tar. Names, and with them order, keys and bytes of what is made,
do not depend on which.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megavis.config.errors import UserError

# Called with a name and a reason for each file that gives no picture.
Refuse = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """One file of a source.

    Attributes:
        key: unique in the source, without a dot or a slash: the key of its sample.
        name: path below the source, with `/`.
        label: index of its class, or -1.
        content: the bytes of the file, not decoded.
    """

    key: str
    name: str
    label: int
    content: bytes


class Part(Protocol):
    """What one unit of work reads; can be pickled."""

    @property
    def num_files(self) -> int:
        """Number of files, 0 where it is not known before reading."""

    def pictures(self, refuse: Refuse) -> Iterator[Picture]:
        """Yield the files in a fixed order; call `refuse` for those that cannot be read."""


class Source(Protocol):
    """A collection of pictures with an identity.

    Attributes:
        description: one line for the manifest.
        class_names: names of the classes; a label indexes them.
        sha256: identity of the list of names and sizes.
        root: the folder or file that it was read from.
    """

    @property
    def description(self) -> str: ...  # noqa: D102
    @property
    def class_names(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102
    @property
    def root(self) -> Path: ...  # noqa: D102

    def parts(self, *, files_per_part: int, seed: int) -> list[Part]:
        """Cut the source into parts; the same arguments give the same parts."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a list.

    Attributes:
        name: its identity: path below the source, with `/`.
        label: index of its class, or -1.
        num_bytes: size; -1 where it cannot be asked.
        path: where it is read, below the root; empty: as its name.
        offset: where it begins in `path`, for a member of a tar; -1: it is the whole file.
    """

    name: str
    label: int
    num_bytes: int
    path: str = ""
    offset: int = -1

    def read(self, root: Path) -> bytes:
        """Return its bytes; fewer than `num_bytes` where a tar was cut. Raises OSError."""
        place = root / (self.path or self.name)
        if self.offset < 0:
            return place.read_bytes()
        with place.open("rb", buffering=0) as tar:
            # Of a sparse or lying header never more than the tar has.
            length = min(self.num_bytes, max(os.fstat(tar.fileno()).st_size - self.offset, 0))
            return os.pread(tar.fileno(), length, self.offset)


@dataclass(frozen=True)
class FileSlice:
    """A part of a `FileSource`: files with their places in the sorted list, which are the keys."""

    root: Path
    files: tuple[tuple[int, SourceFile], ...]

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self.files)

    def pictures(self, refuse: Refuse) -> Iterator[Picture]:
        """Yield the files of the slice, in its order."""
        for place, file in self.files:
            try:
                content = file.read(self.root)
            except OSError:
                refuse(file.name, "unreadable file")
                continue
            if file.offset >= 0 and len(content) < file.num_bytes:
                refuse(file.name, "cut off by the end of its tar")
                continue
            yield Picture(f"{place:09d}", file.name, file.label, content)


@dataclass(frozen=True)
class FileSource:
    """A list of files, sorted by name.

    Attributes:
        description: one line for the manifest.
        root: the folder or tar.
        files: one entry a file, images or not: what is none is refused, and counted, later.
        class_names: names of the classes; a label indexes them.
        sha256: identity of the list of names and sizes.
    """

    description: str
    root: Path
    files: tuple[SourceFile, ...]
    class_names: tuple[str, ...]
    sha256: str

    @classmethod
    def of(
        cls, files: Iterable[SourceFile], *, description: str, root: Path, classes: Sequence[str]
    ) -> FileSource:
        """Make a source of files in any order."""
        ordered = tuple(sorted(files, key=lambda file: file.name))
        digest = hashlib.sha256()
        for file in ordered:
            digest.update(f"{file.name}\0{file.num_bytes}\n".encode("utf-8", "surrogateescape"))
        return cls(description, root, ordered, tuple(classes), digest.hexdigest())

    def parts(self, *, files_per_part: int, seed: int) -> list[Part]:
        """Shuffle the files by `seed` and cut them into slices of `files_per_part`."""
        order = np.random.default_rng(seed).permutation(len(self.files)).tolist()
        return [
            FileSlice(self.root, tuple((place, self.files[place]) for place in places))
            for start in range(0, len(order), files_per_part)
            if (places := order[start : start + files_per_part])
        ]


def list_images(root: Path | str, *, class_names: Sequence[str] | None = None) -> FileSource:
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
    names = list(_walk(root))
    if not names:
        raise UserError(f"{root} holds no file: give a folder of images")
    found = sorted({name.split("/")[0] for name in names if "/" in name})
    number = number_classes(found, class_names, root=root)
    files = (
        SourceFile(
            name, number.get(name.split("/")[0], -1) if "/" in name else -1, _size(root, name)
        )
        for name in names
    )
    return FileSource.of(
        files, description=f"image folder {root.name}", root=root, classes=list(number)
    )


def number_classes(
    found: Sequence[str], known: Sequence[str] | None, *, root: Path
) -> dict[str, int]:
    """Return the number of each class: its place in `known`, or in `found` where that is None.

    Raises:
        UserError: a class that was found is not known.
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


def _size(root: Path, name: str) -> int:
    try:
        return (root / name).stat().st_size
    except OSError:
        return -1
