"""A folder of generated images: complete or absent, and kept when the verb is run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically


def make_folder(
    out: Path, record_name: str, record: Mapping[str, Any], write: Callable[[Path], None]
) -> bool:
    """Make `out` unless it holds what `record` describes; return whether it was made.

    Args:
        out: the folder; it appears under this name only when it is complete.
        record_name: of the JSON file in it that holds `record`.
        record: all that decides what is written.
        write: fills the folder that it is called with.

    Raises:
        UserError: `out` holds something else.
        OSError: the disk fails.
    """
    content = json.dumps(record, indent=2).encode() + b"\n"
    if out.exists() and any(out.iterdir()):
        _check_same(out, record_name, content)
        return False
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    write(partial)
    write_atomically(partial / record_name, content)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return True


def _check_same(out: Path, record_name: str, content: bytes) -> None:
    try:
        same = (out / record_name).read_bytes() == content
    except OSError:
        same = False
    if not same:
        raise UserError(
            f"{out} is not empty and holds other files, or the same made with other options or"
            " versions of packages: choose another folder"
        )
