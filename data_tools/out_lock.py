"""One command at a time writes to a shard folder; several machines may each write a slice."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megavis.data.format.folder_lock import FolderLock, LockUse, holder_of

WRITING = LockUse(
    "shard folder", "another data_tools writes to this folder", "choose another place for this one"
)
_SLICE = re.compile(r"\.lock-(slice-\d+-of-(\d+))-\d+")


@dataclass(frozen=True)
class JobSlice:
    """Slice `number` (from 1) of `count` of a job's units, for one machine."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> JobSlice:
        """Parse `i/n`, 1 <= i <= n. Raises argparse.ArgumentTypeError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 1 <= i <= n, such as 3/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@contextmanager
def hold_out(out: Path, part: JobSlice | None = None) -> Iterator[None]:
    """Hold the lock of `out` for a slice of its shards, by default for all.

    Slices of one division have separate locks. Raises UserError if another command writes to the
    folder, or it cannot be written.
    """
    part = part or JobSlice()
    name = "" if part.count == 1 else f"slice-{part.number}-of-{part.count}"
    with FolderLock(out, name=name, use=WRITING):
        # Check only now: of two commands that start together, at least one sees the other.
        for other in _rivals(out, part.count):
            if (holder := holder_of(out, other)) is not None:
                raise WRITING.refusal(out, holder)
        yield


def _rivals(out: Path, count: int) -> Iterator[str]:
    """Yield the names of the other locks that a slice of a division by `count` excludes."""
    if count > 1:
        yield ""
    for name in os.listdir(out):
        if (match := _SLICE.fullmatch(name)) and int(match[2]) != count:
            yield match[1]
