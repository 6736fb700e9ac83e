"""Atomic file writes (temporary name, fsync, rename), file hashes, and the limit of open files."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` only if the block succeeds.

    The bytes go to a hidden file in the same folder, which is flushed to disk and renamed. After a
    crash or an exception `path` is unchanged. Raises OSError as `open` does.
    """
    # Random, not the PID: machines that share the folder may have processes with equal PIDs.
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`; readers see either the old file or the complete new one."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; create the folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=2).encode() + b"\n")


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
