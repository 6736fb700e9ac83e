"""Write and open safetensors files with the permissions and errors of any other file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors as a new file, with the permissions that the umask gives.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    # Take the mode of a new file: reading the umask would briefly change it for all threads.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    # safetensors writes a temporary file that only its owner may read, and renames it.
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, on the CPU.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is damaged.
    """
    require_readable(path)
    return load_file(path)


def open_tensors(path: Path) -> Any:
    """Open a file as `safetensors.safe_open` does; raises as `load_tensors`."""
    require_readable(path)
    return safe_open(path, framework="pt")


def require_readable(path: Path) -> None:
    """Raise OSError if a file cannot be read, which safetensors reports as a missing file."""
    with path.open("rb"):
        pass
