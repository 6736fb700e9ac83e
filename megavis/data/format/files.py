"""Atomic file writes (temporary name, fsync, rename), file hashes, and JSON of any numbers."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20
_NOT_FINITE = "not_finite"


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` only if the block succeeds.

    The bytes go to a hidden file in the same folder, which is flushed to disk and renamed. After a
    crash or an exception `path` is unchanged. Raises OSError as `open` does, naming the file.
    """
    # Random rather than the PID: machines that share the folder may have equal PIDs.
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # An error of writing, as to a full disk, has none.
        raise
    flush_folder(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`; readers see either the old file or the complete new one."""
    with atomic_writer(path) as file:
        file.write(content)


def make_within(folder: Path, *names: str) -> Path:
    """Create a chain of folders in an existing one; return the last of them.

    `folder` itself is not created: if its disk is not mounted, the mount point must stay empty.

    Raises:
        OSError: `folder` does not exist, or a folder cannot be created.
    """
    for name in names:
        folder = folder / name
        folder.mkdir(exist_ok=True)
    return folder


def append(path: Path, content: bytes, *, size: int) -> int:
    """Append to a file of `size` bytes and return its new size; raises OSError.

    If the file is longer, a failed attempt has left the rest, which is replaced.
    """
    written = 0
    # Reopen the file: on a network disk, a full quota is only reported on close, and a file that
    # another host has replaced is stale. Unbuffered, since a buffer discards bytes that do not fit.
    with open(path, "ab", buffering=0) as file:
        start = min(size, os.fstat(file.fileno()).st_size)
        file.truncate(start)
        while written < len(content):
            written += file.write(content[written:])
    return start + written


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; create the folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(value, indent=2).encode() + b"\n")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that any parser can read: the standard has neither NaN nor infinities.

    These become null, and the object that holds them gets a key `not_finite` with their names and
    original values: `nan`, `inf` or `-inf`. A number in a list is named `key.index`.
    """
    return json.dumps(_without_infinities(value, "", {}), indent=indent, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """Invert `to_json`; also read NaN and infinities as Python writes them. Raises ValueError."""
    return json.loads(text, object_hook=_with_infinities)


def _without_infinities(value: Any, name: str, found: dict[str, str]) -> Any:
    """Replace NaN and infinities by null, and add their names to `found`."""
    if isinstance(value, float) and not math.isfinite(value):
        found[name] = str(float(value))
        return None
    if isinstance(value, Mapping):
        own: dict[str, str] = {}
        inner = {key: _without_infinities(each, str(key), own) for key, each in value.items()}
        return {**inner, _NOT_FINITE: own} if own else inner
    if isinstance(value, list | tuple):
        return [_without_infinities(e, f"{name}.{i}", found) for i, e in enumerate(value)]
    return value


def _with_infinities(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return _restored(value, value.pop(_NOT_FINITE, {}))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"`{_NOT_FINITE}` names no number next to it ({error})") from None


def _restored(value: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    for name, number in names.items():
        node: Any = value
        key, places = name, list[int]()
        while key not in value:
            key, _, place = key.rpartition(".")
            places.insert(0, int(place))
        for each in (first := [key, *places])[:-1]:
            node = node[each]
        node[first[-1]] = float(number)
    return value


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files below a folder to a new one, with the modes of new files. Raises OSError."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir():
            copy_folder(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power failure.

    Some file systems, such as folders that a virtual machine shares with its host, cannot.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
