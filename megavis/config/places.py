"""Whether results can be written to a place, found before a long job by trying it.

Access rights say less: the root user has them everywhere, also in /proc and on read-only disks.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from megavis.config.errors import UserError


def refusal(folder: Path) -> str:
    """Return why no file can be created in an existing folder; empty if one can. Leaves nothing."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def nearest_folder(path: Path) -> Path:
    """Return the first of the folders above a path that exists.

    Raises:
        UserError: it is a file.
        OSError: it cannot be looked up.
    """
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise UserError(f"{path} would lie in {above}, which is not a folder")
    return above


def check_place(path: Path) -> None:
    """Check that a file or folder can be created at a path, with the folders above it.

    Raises:
        UserError: it cannot.
    """
    try:
        above = nearest_folder(path)
        # A disk refuses names that are too long, also of folders that do not exist yet.
        for name in path.absolute().relative_to(above).parts:
            with contextlib.suppress(FileNotFoundError):
                (above / name).stat()
        why = refusal(above)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UserError(f"{path}: nothing can be written there ({why}); choose another place")


def check_file(path: Path) -> None:
    """Check that a file can be written at a path; raise UserError if it cannot."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
    check_place(path)
