"""Write and open safetensors files with the permissions and errors of any other file."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megavis.config.errors import UserError

_POINTER = b"version https://git-lfs.github.com/spec/"


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors as a new file, with the permissions that the umask gives.

    Raises OSError if the file cannot be written.
    """
    path.unlink(missing_ok=True)
    # Take the mode of a new file: reading the umask would briefly change it for all threads.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        # The library wraps the system's errors, such as that of a full disk.
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    # safetensors writes a temporary file that only its owner may read, and renames it.
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, on the CPU; raises as `open_tensors`."""
    require_readable(path)
    with _damage_named(path):
        return load_file(path)


def open_tensors(path: Path) -> Any:
    """Open a file as `safetensors.safe_open` does.

    Raises:
        OSError: the file cannot be read.
        UserError: it is damaged, or a pointer of Git LFS.
    """
    require_readable(path)
    with _damage_named(path):
        return safe_open(path, framework="pt")


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None


def require_readable(path: Path) -> None:
    """Check that a file can be read, and that a clone of its repository has fetched it.

    Raises:
        OSError: it cannot be read, which safetensors reports as a missing file.
        UserError: it is a pointer of Git LFS.
    """
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        raise UserError(
            f"{path}: a pointer of Git LFS in place of the file; fetch it with `git lfs pull`, or"
            " the folder with `hf download`"
        )
