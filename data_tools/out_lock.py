"""One command at a time writes to a shard folder; several machines may each write a slice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megavis.data.format.folder_lock import FolderLock, LockUse, holder_of

WRITING = LockUse(
    "shard folder", "another data_tools writes to this folder", "choose another place for this one"
)
_SLICE = re.compile(r"\.lock-(slice-\d+-of-(\d+))-\d+")


class Slice(Protocol):
    """Slice `number` of `count`; 1 of 1 is the whole."""

    @property
    def number(self) -> int: ...  # noqa: D102 - see above
    @property
    def count(self) -> int: ...  # noqa: D102 - see above


@contextmanager
def hold_out(out: Path, part: Slice) -> Iterator[None]:
    """Hold the lock of `out` for a slice of its shards.

    Slices of one division have separate locks. Raises UserError if another command writes to the
    folder, or it cannot be written.
    """
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
