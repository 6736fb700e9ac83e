"""Explain what a path given instead of a shard folder is, and how to make shards of it.

The path may be anything, even a home folder or a whole disk, so only a few entries are examined,
and folders that may not be listed are skipped.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from megavis.config.errors import counted
from megavis.data.format.folders import (
    COMPRESSED_TARS,
    MANIFEST_NAME,
    counts,
    has_image_suffix,
    is_image,
    named_like_splits,
)

_MOST_ENTRIES = 1000
_NAMED = 3
_AGAIN = "run the `python -m data_tools` command that makes it (again) to finish it"
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_TAR_MAGIC = (257, b"ustar")


def what_it_is(path: Path) -> str:
    """Return a sentence on what a path without a manifest is, and on what would be right."""
    if not os.path.lexists(path):
        return _not_there(path)
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return _folder(path) if path.is_dir() else _file(path)


def _not_there(path: Path) -> str:
    text = str(path)
    if match := _VARIABLE.search(text):
        there = os.path.expandvars(text)
        what = there if "$" not in there and os.path.exists(there) else "the path itself"
        return f"{path} does not exist; {match[0]} is not replaced in a path: write {what}"
    if text.startswith("~"):
        user = text.partition("/")[0]
        return f"{path} does not exist; {user} is not replaced in a path: write the path itself"
    if path.is_absolute():
        return f"{path} does not exist: give a shard folder, which `python -m data_tools` makes"
    here = Path.cwd()
    elsewhere = next((above / path for above in here.parents if os.path.exists(above / path)), None)
    return f"{path} does not exist in {here}, where relative paths start" + (
        f"; there is {elsewhere}" if elsewhere else ""
    )


def _file(path: Path) -> str:
    if (path.parent / MANIFEST_NAME).exists():
        return f"{path} is a file of a shard folder: give the folder, {path.parent}"
    if path.name.lower().endswith(COMPRESSED_TARS):
        advice = "unpack it, and give its folder to `python -m data_tools jpeg`"
        return f"{path} is a compressed tar: {advice}"
    if _is_tar(path):
        return f"{path} is a tar, not a shard folder; {_makes_shards(path)}"
    kind = "an image" if is_image(path) else "a file"
    return f"{path} is {kind}; give a shard folder, which `python -m data_tools` makes"


def _is_tar(path: Path) -> bool:
    start, magic = _TAR_MAGIC
    try:
        with path.open("rb") as file:
            return file.read(start + len(magic))[start:] == magic
    except OSError:
        return False


def _folder(path: Path) -> str:
    try:
        names = _names(path)
    except OSError as error:
        return f"{path} cannot be listed: {error.strerror}, and {MANIFEST_NAME} is not in it"
    # os.path, which treats a path in a forbidden folder as missing, where pathlib raises.
    finished = [name for name in names if os.path.exists(path / name / MANIFEST_NAME)]
    if finished:
        return f"{path} holds the shard folders {_listed(finished)}: give one of them"
    of_job = ("report.json", "palette.npy")
    if any(name.endswith(".index.json") or name in of_job for name in names):
        return f"{path / MANIFEST_NAME} is missing: this is not a finished shard folder; {_AGAIN}"
    if {"config.yaml", "checkpoints"} <= set(names):
        return f"{path} is a run folder; give a shard folder, which `python -m data_tools` makes"
    names = [name for name in names if counts(name)]
    tars = [name for name in names if name.lower().endswith(".tar")]
    folders = [name for name in names if _has_images(path / name)]
    if folders and named_like_splits(folders):
        of_one = _makes_shards(path / folders[0])
        return f"{path} holds folders of images, {_listed(folders)}; {of_one}"
    if folders or any(map(has_image_suffix, names)):
        return f"{path} is a folder of images, not of shards; {_makes_shards(path)}"
    if tars:
        which = "which is not a shard" if len(tars) == 1 else "which are not shards"
        found = f"{counted(len(tars), 'tar')}, {which} of megavis"
        return f"{path} holds {found}; {_makes_shards(path)}"
    what = "holds neither shards nor images" if names else "is empty"
    missing = f"{path} {what}, and {MANIFEST_NAME} is missing"
    return f"{missing}: if it is to be a shard folder, {_AGAIN}"


def _makes_shards(source: Path) -> str:
    command = f"python -m data_tools jpeg {shlex.quote(str(source))} --out FOLDER"
    return f"`{command}` makes shards of it (`palette shards`: of tokens)"


def _has_images(folder: Path, depth: int = 2) -> bool:
    try:
        names = [name for name in _names(folder) if counts(name)]
    except OSError:
        return False
    if any(map(has_image_suffix, names)):
        return True
    return depth > 0 and any(_has_images(folder / name, depth - 1) for name in names[:_NAMED])


def _names(folder: Path) -> list[str]:
    """Return the names of the first entries of a folder. Raises OSError."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in itertools.islice(entries, _MOST_ENTRIES))


def _listed(names: Sequence[str]) -> str:
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
