"""Read tars member by member, and detect where they are damaged or truncated."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 1 << 20
EMPTY = "empty tar"
DAMAGED = "damaged tar: what follows in it is lost"
CUT = "tar cut off: what follows in it is lost"
_SPARSE = "sparse member of a tar"
_LINK = "link in a tar"


class BrokenTarError(Exception):
    """A damaged or truncated tar; the message is the reason under which it is counted."""


def tar_members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files and links of an uncompressed tar in order, reading only headers.

    Hidden files, including the entries that some systems add for attributes, are skipped;
    `why_not` tells which of the others cannot be read. The caller may seek between two members.

    Raises:
        BrokenTarError: at the first damage, after what precedes it. `tarfile` alone would end
            silently at a damaged header, and at zeros that look like the end.
        OSError: reading fails.
    """
    try:
        with tarfile.open(
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # do not keep them all
                is_file = member.isreg() or member.issym() or member.islnk()
                if is_file and not member.name.split("/")[-1].startswith("."):
                    yield member
            end = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise BrokenTarError(_reason(str(error))) from None
    _check_end(file, end)


def why_not(member: tarfile.TarInfo) -> str:
    """Return why a member of a tar cannot be read in place; empty if it can."""
    if member.issparse():
        return _SPARSE
    return "" if member.isreg() else _LINK


def _reason(text: str) -> str:
    if "empty file" in text:
        return EMPTY
    return CUT if "unexpected end" in text or "truncated" in text else DAMAGED


def _check_end(file: BinaryIO, end: int) -> None:
    """Raise BrokenTarError if the blocks from `end` are not those of a finished tar."""
    file.seek(end)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise BrokenTarError(CUT)
    while block:
        if block.count(0) != len(block):
            raise BrokenTarError(DAMAGED)
        block = file.read(_CHUNK_BYTES)


class Stretch:
    """A read-only view of a range of another file: a tar inside a tar."""

    def __init__(self, file: BinaryIO, *, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._place = 0

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes."""
        left = max(self._length - self._place, 0)
        self._file.seek(self._start + self._place)
        content = self._file.read(left if count < 0 else min(count, left))
        self._place += len(content)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position; see `io.IOBase.seek`."""
        origin = {0: 0, 1: self._place, 2: self._length}[whence]
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        """Return the position in the range."""
        return self._place


def is_tar(path: Path) -> bool:
    """Return whether a file starts like an uncompressed tar, or is empty. Raises OSError."""
    with path.open("rb") as file:
        block = file.read(_BLOCK)
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    # Missing in tarfile's type stubs.
    except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
        return True
    except tarfile.HeaderError:
        return False
    return True


def first_member(path: Path) -> str:
    """Return the name of the first file in a tar; empty if there is none. Raises OSError."""
    with path.open("rb") as file:
        try:
            return next((member.name for member in tar_members(file)), "")
        except BrokenTarError:
            return ""
