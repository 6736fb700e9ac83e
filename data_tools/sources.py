"""Sources of images: a source is divided into parts, and a part yields file contents.

A part is the input of one unit of work. It is small, is sent to other processes, and opens files
only there. `FileSource` is a list of files that is shuffled and divided into slices; its files may
be in a folder or, by offset, inside a tar. Names, and therefore order, keys and bytes of shards,
are the same for both.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol
from unicodedata import category

import numpy as np

from data_tools.decode import RefusedImageError
from megavis.config.errors import NOT_ALLOWED, UserError, counted
from megavis.data.format.folders import has_image_suffix, is_image, walk_files, why_no_images

# Called with name and reason of each rejected file.
Refuse = Callable[[str, str], None]

# Larger than any photograph; larger files are not read into memory.
MAX_FILE_BYTES = 1 << 30
CUT_OFF = "cut off by the end of its tar"
TOO_LARGE = "too large"
DUPLICATE = "duplicate name: the last one counts"
UNREADABLE = "unreadable file"
WRONG_LABEL = "label outside the list of classes"
_NOT_REGULAR = "not a regular file"
# Errors of a path that leads nowhere, and of one that never can be read.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_STAYS = (*NOT_ALLOWED, errno.ELOOP)
# A bad sector, and permissions that access(2) does not predict.
_OF_ONE_FILE = (errno.EIO, errno.EACCES, errno.EPERM)
# Unicode's categories of control characters, and of separators of lines and paragraphs.
_CONTROLS = ("Cc", "Zl", "Zp")


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One file of a source.

    Attributes:
        key: key of its sample: unique in the source, without dots and slashes.
        name: printable path below the source, with `/`.
        label: index of its class, or -1.
        content: undecoded bytes of the file.
    """

    key: str
    name: str
    label: int
    content: bytes


class SourcePart(Protocol):
    """Input of one unit of work; picklable."""

    @property
    def num_files(self) -> int:
        """Number of files; 0 if it is not known before reading."""

    def pictures(self, refuse: Refuse, unread: Counter[str] | None = None) -> Iterator[SourceImage]:
        """Yield the files in a fixed order.

        Args:
            refuse: called for files that cannot be read.
            unread: counts, by suffix, files of images that are neither read nor rejected.
        """


class ImageSource(Protocol):
    """A collection of images with an identity.

    Attributes:
        description: one line for the manifest.
        class_names: names of the classes, indexed by label.
        label_column: where labels are chosen to be read from, in a source that has several; no part
            of `sha256`, since a selection of the images holds for any labels.
        sha256: identity of the list of names and sizes.
        root: folder or file of the source, or its URL.
    """

    @property
    def description(self) -> str: ...  # noqa: D102 - see above
    @property
    def class_names(self) -> tuple[str, ...]: ...  # noqa: D102 - see above
    @property
    def label_column(self) -> str: ...  # noqa: D102 - see above
    @property
    def sha256(self) -> str: ...  # noqa: D102 - see above
    @property
    def root(self) -> Path | str: ...  # noqa: D102 - see above

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Divide the source into parts; the same arguments give the same parts."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a list.

    Attributes:
        name: its identity: printable path below the source, with `/`.
        label: index of its class, or -1.
        num_bytes: size; -1 if unknown.
        path: path below the root; empty if equal to the name; "." if the root is a file.
        offset: start in `path`, for a member of a tar; -1 for a separate file.
        refused: reason for rejecting it, if known without reading it.
    """

    name: str
    label: int
    num_bytes: int
    path: str = ""
    offset: int = -1
    refused: str = ""

    def but_refused(self, reason: str) -> SourceFile:
        """Return the file with a reason for rejecting it; unchanged if the reason is empty."""
        return replace(self, refused=self.refused or reason) if reason else self

    def read(self, root: Path) -> bytes:
        """Read the file; fewer than `num_bytes` in a truncated tar. Raises OSError."""
        place = root / (self.path or self.name)
        if self.offset < 0:
            return read_file(place)
        with errors_named(place), place.open("rb", buffering=0) as tar:
            # Never read more than the tar has, even if a header says so.
            length = min(self.num_bytes, max(os.fstat(tar.fileno()).st_size - self.offset, 0))
            return os.pread(tar.fileno(), length, self.offset)


# Reads the bytes of an image below a root; a picklable function.
Reading = Callable[[SourceFile, Path], bytes]


@dataclass(frozen=True)
class FileSlice:
    """A part of a `FileSource`: files with their indices in the sorted list, which are the keys."""

    root: Path
    files: tuple[tuple[int, SourceFile], ...]
    read: Reading = SourceFile.read

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self.files)

    def pictures(self, refuse: Refuse, unread: Counter[str] | None = None) -> Iterator[SourceImage]:
        """Yield the files of the slice in order.

        Raises OSError if the disk has failed since they were listed: a rerun may read them.
        """
        for place, file in self.files:
            if file.refused or file.num_bytes > MAX_FILE_BYTES:
                refuse(file.name, file.refused or TOO_LARGE)
                continue
            try:
                content = self.read(file, self.root)
            except RefusedImageError as refusal:
                refuse(file.name, str(refusal))
                continue
            except OSError as error:
                # A tar could be opened when it was listed.
                is_tar = file.offset >= 0 and error.errno != errno.EIO
                if is_tar or not is_of_one_file(error, self.root):
                    raise
                refuse(file.name, UNREADABLE)
                continue
            if file.offset >= 0 and len(content) < file.num_bytes:
                refuse(file.name, CUT_OFF)
                continue
            yield SourceImage(f"{place:09d}", file.name, file.label, content)


@dataclass(frozen=True)
class FileSource:
    """A list of files, sorted by name.

    Attributes:
        description: one line for the manifest.
        root: the folder or tar.
        files: all files, including those that are not images, which are rejected and counted later.
        class_names: names of the classes, indexed by label.
        sha256: identity of the list of names and sizes.
        read: reads the bytes of a file.
    """

    description: str
    root: Path
    files: tuple[SourceFile, ...]
    class_names: tuple[str, ...]
    sha256: str
    read: Reading = SourceFile.read
    label_column: ClassVar[str] = ""

    @classmethod
    def of(
        cls,
        files: Iterable[SourceFile],
        *,
        description: str,
        root: Path,
        classes: Sequence[str],
        extra: str = "",
        read: Reading = SourceFile.read,
    ) -> FileSource:
        """Return a source of files in any order; `extra` is part of its identity.

        If files have the same name, the last one is used, as when a tar is unpacked.
        """
        ordered = sorted(files, key=lambda file: file.name)
        for place, (file, following) in enumerate(itertools.pairwise(ordered)):
            if file.name == following.name:
                ordered[place] = file.but_refused(DUPLICATE)
        digest = hashlib.sha256(extra.encode())
        for file in ordered:
            digest.update(f"{file.name}\0{file.num_bytes}\n".encode())
        description = printable(description)
        return cls(description, root, tuple(ordered), tuple(classes), digest.hexdigest(), read)

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Shuffle the files by `seed` and divide them into slices of `files_per_part`."""
        order = np.random.default_rng(seed).permutation(len(self.files)).tolist()
        return [
            FileSlice(self.root, tuple((place, self.files[place]) for place in places), self.read)
            for start in range(0, len(order), files_per_part)
            if (places := order[start : start + files_per_part])
        ]


def printable(name: str) -> str:
    """Convert a file name of any bytes to text of one line that JSON and terminals accept."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in _CONTROLS else each
        for each in text
    )


def list_images(root: Path | str, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List the files below `root`; the first folder on the path to a file is its class.

    Files directly in `root` have no class, and a folder without images is not a class. Hidden files
    and folders are skipped; links are followed, but each folder is visited once. With `class_names`
    of another data set, its numbering is used. Raises UserError if `root` is not a folder, has no
    images or holds a folder that cannot be listed, or if a class is not in `class_names`, and
    OSError if a file vanishes meanwhile.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of images")
    files = [file_of(root, raw) for raw in walk_files(root)]
    holding = {_folder(file) for file in files if has_image_suffix(file.name)}
    for file in files:
        if _folder(file) not in holding and is_image(root / (file.path or file.name)):
            holding.add(_folder(file))
    if not holding:
        raise UserError(why_no_images(root))
    return label_by_folder(
        files,
        description=f"image folder {root.name}",
        root=root,
        folders=holding,
        class_names=class_names,
    )


def _folder(file: SourceFile) -> str:
    """Return the first folder of a file's name, its class; empty if it is in none."""
    return file.name.partition("/")[0] if "/" in file.name else ""


def label_by_folder(
    files: Sequence[SourceFile],
    *,
    description: str,
    root: Path,
    folders: Collection[str],
    class_names: Sequence[str] | None = None,
) -> FileSource:
    """Return a source of files whose class is the first folder of their name, if any.

    Only `folders` are classes. They are numbered in order of their names, or as in `class_names` of
    another data set; a class that is not among these raises UserError.
    """
    number = number_classes(sorted(set(folders) - {""}), class_names, root=root)
    labelled = (
        replace(file, label=number[name] if (name := _folder(file)) in folders and name else -1)
        for file in files
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


def number_chosen(only: Sequence[str], found: Sequence[str], *, root: Path) -> dict[str, int]:
    """Return the numbers of the classes of `--only-classes`, in order of their names.

    Raises UserError if one is not among those found.
    """
    if missing := sorted(set(only) - set(found)):
        raise UserError(
            f"--only-classes: {root} has no class {missing[0]!r}; it has"
            f" {counted(len(found), 'class', 'classes')}, such as"
            f" {', '.join(found[:3]) or 'none'}"
        )
    return {name: label for label, name in enumerate(sorted(only))}


def file_of(root: Path, raw: str) -> SourceFile:
    """Return a file by its path below `root`, without a label. Raises as `size_and_fault`."""
    name = printable(raw)
    path = "" if name == raw else raw
    num_bytes, fault = size_and_fault(root / raw)
    return SourceFile(name, -1, num_bytes, path, refused=fault)


def read_file(path: Path) -> bytes:
    """Read a file. Raises OSError with its name."""
    with errors_named(path):
        return path.read_bytes()


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Add the file's name to OSErrors raised in the block; those of `read()` have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def is_of_one_file(error: OSError, root: Path) -> bool:
    """Return whether one file cannot be read, now or later, while its disk is there.

    The error names the file, which still has a size, and `root` can still be listed, or, if it is
    a file, be read.
    """
    if error.errno not in _OF_ONE_FILE or error.filename is None:
        return False
    try:
        Path(error.filename).stat()
        if not root.is_dir():
            with root.open("rb") as file:
                return bool(file.read(1))
        with os.scandir(root) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def size_and_fault(place: Path) -> tuple[int, str]:
    """Return the size of a file, -1 if unknown, and why it cannot be read; empty if it can.

    Such a fault is a file without permission, a broken link, a loop of links, or no file, such as
    a pipe: it stays, whatever happens later. Raises OSError for others, as of a disk that fails.
    """
    num_bytes = -1
    try:
        status = place.stat()
        num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block forever
            return num_bytes, _NOT_REGULAR
        if not os.access(place, os.R_OK):
            place.open("rb").close()  # access(2) does not say why
    except OSError as error:
        is_broken_link = error.errno in _ABSENT and place.is_symlink()
        if error.errno not in _STAYS and not is_broken_link:
            raise
        return num_bytes, UNREADABLE
    return num_bytes, ""


def listed_size_and_fault(root: Path, name: str) -> tuple[int, str]:
    """Return `size_and_fault` of a file that a list names, whose absence is a fault too.

    Raises OSError if its folder cannot be listed, or is empty as a mount point without its disk.
    """
    place = root / name
    try:
        num_bytes, fault = size_and_fault(place)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        folder = place.parent
        while folder != root and not folder.is_dir() and not folder.is_symlink():
            folder = folder.parent
        with os.scandir(folder) as entries:
            if next(entries, None) is None:
                raise
        return -1, UNREADABLE
    return -1 if fault == _NOT_REGULAR else num_bytes, fault
