"""Exceptions that the command line reports in one message with an exit code, and their wording."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CORRUPTION_EXIT_CODE = 71
"""`sysexits.h` calls it EX_OSERR, an error of the system below."""
GIVEN_UP_EXIT_CODE = 72
"""For launchers, which try other errors again in a job that has run before."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""A path without permission, or on a read-only file system."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a spent quota, or a file that is larger than the limit."""


@dataclass(frozen=True)
class Remedy:
    """What to change in a config, in the words `set KEY to VALUE`.

    Code that does not know how its caller names the key, or whether it can be changed, raises a
    `UserError` with a remedy, and the caller may replace it.

    Attributes:
        key: such as `data.crop`.
        value: what would be right.
    """

    key: str
    value: str

    def __str__(self) -> str:
        return f"set {self.key} to {self.value}"


class UserError(ValueError):
    """A user's mistake: the command line prints one message and exits with code 2.

    Attributes:
        issues: what is wrong, each with the config key to blame, such as `data.train`, or None. The
            command line adds the file and line of a key.
        fault: what is wrong, without the key to blame and the remedy.
        remedy: the end of the message, if it is about another key.
    """

    def __init__(self, text: str, *, key: str | None = None, remedy: Remedy | None = None) -> None:
        self.fault, self.remedy = text, remedy
        text = text if remedy is None else f"{text}; {remedy}"
        super().__init__(text if key is None else f"{key}: {text}")
        self.issues: tuple[tuple[str | None, str], ...] = ((key, text),)

    @classmethod
    def of(cls, issues: Iterable[tuple[str | None, str]]) -> UserError:
        """Return one error of several mistakes, each on a line of its own."""
        each = [cls(text, key=key) for key, text in issues]
        error = cls("\n".join(map(str, each)))
        error.issues = tuple(issue for one in each for issue in one.issues)
        return error


class GivenUpError(UserError):
    """Training must not go on by itself: it makes no progress, or another job has taken over."""


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
    """Blame a config key for UserErrors in the block that do not blame one."""
    try:
        yield
    except UserError as error:
        raise UserError.of((found or key, text) for found, text in error.issues) from error


def permissions_needed(what: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Raise UserError if the block lacks a permission, so that no launcher tries again.

    For work before the first step: a disk that turns read-only later is not a user's mistake. If
    `what` is given, the message names it instead of the file.
    """
    return _blame_place(NOT_ALLOWED, what, "")


@contextlib.contextmanager
def start_needs(folder: Path) -> Iterator[None]:
    """Raise UserError if a block lacks a permission, or room for the files that a start writes.

    For work before the first step, as `permissions_needed`. The message names the file, or else
    `folder`: an error of writing, as to a full disk, has no name.
    """
    try:
        with permissions_needed():
            yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(f"{error.filename or folder}: {error.strerror}") from error


def room_needed(what: Path) -> contextlib.AbstractContextManager[None]:
    """Raise UserError, which names what is written, if the disk of a block's results is full.

    For work that leaves no part of a result behind.
    """
    return _blame_place(NO_ROOM, str(what), "; the result was discarded")


@contextlib.contextmanager
def _blame_place(numbers: Sequence[int], what: str | None, ending: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise UserError(f"{what or error.filename}: {error.strerror}{ending}") from error


class CorruptionError(RuntimeError):
    """Replicas disagree: exit code 71."""


class UnfinishedError(RuntimeError):
    """The run stopped on a signal after checkpointing and should be restarted: exit code 75.

    `sysexits.h` calls the code EX_TEMPFAIL: "the user is invited to retry".
    """


def describe_os_error(error: OSError) -> str:
    """Return error and file name in one line."""
    return f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 shard`, `2 shards`, `1,000 shards`.

    Args:
        count: at least 0.
        noun: noun in the singular.
        plural: plural, if it is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
