"""Write a folder of generated images atomically, and keep it when the verb is run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_tools.out_lock import WRITING
from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.data.format.folder_lock import FolderLock


def make_folder(
    out: Path, record_name: str, record: Mapping[str, Any], write: Callable[[Path], None]
) -> bool:
    """Create `out` unless it has what `record` describes; return whether it was created.

    Args:
        out: the folder; it gets this name only when it is complete.
        record_name: name of the JSON file in it for `record`.
        record: everything that determines the content.
        write: writes the content into a given folder.

    Raises:
        UserError: `out` has other content, or another command writes it.
        OSError: writing fails.
    """
    content = json.dumps(record, indent=2).encode() + b"\n"
    # Not in the folder itself, which gets its name when it is complete.
    with FolderLock(out.absolute().parent, name=out.name, use=WRITING):
        if out.exists() and any(out.iterdir()):
            _check_same(out, record_name, content)
            return False
        partial = out.with_name(f"{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
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
            f"{out} is not empty and has other files, or the same files made with other options or"
            " versions of packages: choose another folder"
        )
