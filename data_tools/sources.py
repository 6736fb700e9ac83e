"""Sources of images: a source is cut into parts, and a part yields file contents.

A part is what one unit of work reads. It is small, travels to other processes, and opens files
only there. `FileSource` is a list of files that is shuffled and cut into slices; its files may lie
in a folder or, by offset, inside a tar. Names, and with them order, keys and bytes of what is made,
do not depend on which.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from data_tools.decode import RefusedImageError

# Called with a name and a reason for each file that gives no picture.
Refuse = Callable[[str, str], None]

# No photograph is larger; what claims to be is not read into memory.
MAX_FILE_BYTES = 1 << 30
CUT_OFF = "cut off by the end of its tar"
TOO_LARGE = "too large"
_DUPLICATE = "duplicate name: the last one counts"


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One file of a source.

    Attributes:
        key: unique in the source, without a dot or a slash: the key of its sample.
        name: path below the source, with `/`; can be printed.
        label: index of its class, or -1.
        content: the bytes of the file, not decoded.
    """

    key: str
    name: str
    label: int
    content: bytes


class SourcePart(Protocol):
    """What one unit of work reads; can be pickled."""

    @property
    def num_files(self) -> int:
        """Number of files, 0 where it is not known before reading."""

    def pictures(self, refuse: Refuse) -> Iterator[SourceImage]:
        """Yield the files in a fixed order; call `refuse` for those that cannot be read."""


class ImageSource(Protocol):
    """A collection of pictures with an identity.

    Attributes:
        description: one line for the manifest.
        class_names: names of the classes; a label indexes them.
        sha256: identity of the list of names and sizes.
        root: the folder or file that it was read from.
    """

    @property
    def description(self) -> str: ...  # noqa: D102 - see above
    @property
    def class_names(self) -> tuple[str, ...]: ...  # noqa: D102 - see above
    @property
    def sha256(self) -> str: ...  # noqa: D102 - see above
    @property
    def root(self) -> Path: ...  # noqa: D102 - see above

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Cut the source into parts; the same arguments give the same parts."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a list.

    Attributes:
        name: its identity: path below the source, with `/`; can be printed.
        label: index of its class, or -1.
        num_bytes: size; -1 where it cannot be asked.
        path: where it is read, below the root; empty: as its name; ".": the root is a file.
        offset: where it begins in `path`, for a member of a tar; -1: it is the whole file.
        refused: why it gives no picture, where that is known without reading it.
    """

    name: str
    label: int
    num_bytes: int
    path: str = ""
    offset: int = -1
    refused: str = ""

    def but_refused(self, reason: str) -> SourceFile:
        """Return it as refused for a reason; itself where the reason is empty."""
        return replace(self, refused=self.refused or reason) if reason else self

    def read(self, root: Path) -> bytes:
        """Return its bytes; fewer than `num_bytes` where a tar was cut. Raises OSError."""
        place = root / (self.path or self.name)
        if self.offset < 0:
            return place.read_bytes()
        with place.open("rb", buffering=0) as tar:
            # Of a sparse or lying header never more than the tar has.
            length = min(self.num_bytes, max(os.fstat(tar.fileno()).st_size - self.offset, 0))
            return os.pread(tar.fileno(), length, self.offset)


# How the bytes of a picture are read, below a root; a function of a module, which can be pickled.
Reading = Callable[[SourceFile, Path], bytes]


@dataclass(frozen=True)
class FileSlice:
    """A part of a `FileSource`: files with their places in the sorted list, which are the keys."""

    root: Path
    files: tuple[tuple[int, SourceFile], ...]
    read: Reading = SourceFile.read

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self.files)

    def pictures(self, refuse: Refuse) -> Iterator[SourceImage]:
        """Yield the files of the slice, in its order."""
        for place, file in self.files:
            if file.refused or file.num_bytes > MAX_FILE_BYTES:
                refuse(file.name, file.refused or TOO_LARGE)
                continue
            try:
                content = self.read(file, self.root)
            except (OSError, RefusedImageError) as error:
                refuse(file.name, "unreadable file" if isinstance(error, OSError) else str(error))
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
        files: one entry a file, images or not: what is none is refused, and counted, later.
        class_names: names of the classes; a label indexes them.
        sha256: identity of the list of names and sizes.
        read: how the bytes of one of them are read.
    """

    description: str
    root: Path
    files: tuple[SourceFile, ...]
    class_names: tuple[str, ...]
    sha256: str
    read: Reading = SourceFile.read

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
        """Make a source of files in any order; `extra` is part of its identity.

        Of files with one name the last counts, as when a tar is unpacked.
        """
        ordered = sorted(files, key=lambda file: file.name)
        for place, (file, following) in enumerate(itertools.pairwise(ordered)):
            if file.name == following.name:
                ordered[place] = file.but_refused(_DUPLICATE)
        digest = hashlib.sha256(extra.encode())
        for file in ordered:
            digest.update(f"{file.name}\0{file.num_bytes}\n".encode())
        return cls(description, root, tuple(ordered), tuple(classes), digest.hexdigest(), read)

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Shuffle the files by `seed` and cut them into slices of `files_per_part`."""
        order = np.random.default_rng(seed).permutation(len(self.files)).tolist()
        return [
            FileSlice(self.root, tuple((place, self.files[place]) for place in places), self.read)
            for start in range(0, len(order), files_per_part)
            if (places := order[start : start + files_per_part])
        ]


def printable(name: str) -> str:
    """Return a file name of any bytes as text that JSON and terminals take."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
