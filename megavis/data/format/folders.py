"""Contents of a user's folder: images, class folders, tars, shards, or none of them.

Hidden entries and those added by systems and tools are ignored. A folder that cannot be listed is
an error, since the number of a class is its position among all of them.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megavis.config.errors import UserError, counted

MANIFEST_NAME = "manifest.json"
_SUFFIXES = "jpg jpeg jpe jfif png webp gif bmp dib tif tiff ppm pgm pbm pnm jp2 j2k"
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
"""Suffixes of image files, in lower case; other images are recognized by their first bytes."""
START_BYTES = 16
"""Number of bytes of a file that `looks_like_image` needs."""

# Added by Synology and QNAP disks, macOS, Windows and ext4.
_OF_SYSTEMS = frozenset(
    ("@eadir", "#recycle", "@recycle", "__macosx", "$recycle.bin", "lost+found")
) | {"system volume information"}
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# Check a bitmap's four reserved bytes: otherwise any text that starts with BM would match.
_IMAGE_START = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*|BM....\0\0\0\0"
    rb"|P[1-6]\s|\0\0\0\x0cjP  \r\n|\xff\x4f\xff\x51",
    re.DOTALL,
)
_SPLITS = frozenset(
    ("train", "training", "trainset", "val", "valid", "validation", "dev", "test", "testing")
)


def named_like_splits(folders: Iterable[str]) -> bool:
    """Return whether all folders are named like splits of a data set, which are not classes."""
    return all(name.lower() in _SPLITS for name in folders)


def counts(name: str) -> bool:
    """Return whether an entry of a folder is neither hidden nor added by a system."""
    return not name.startswith(".") and name.lower() not in _OF_SYSTEMS


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that count, by name. Raises UserError if not listable."""
    try:
        return _entries(folder)
    except OSError as error:
        raise _cannot_list(error) from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if counts(entry.name)]
    return sorted(found, key=lambda entry: entry.name)


def holds_manifest(folder: Path) -> bool:
    """Return whether a folder is a shard folder. Raises UserError if it may not be entered."""
    try:
        return (folder / MANIFEST_NAME).is_file()
    except PermissionError as error:
        # Name the folder rather than the manifest, which may not exist.
        raise UserError(f"{folder} cannot be listed: {error.strerror}") from None


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match, sorted.

    Raises UserError if the folder cannot be listed, where `Path.glob` finds none.
    """
    try:
        names = [entry.name for entry in _entries(folder)]
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {error.strerror}") from None
    return [folder / name for name in names if fnmatch.fnmatch(name, pattern)]


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths below `root` of all files that count, folder by folder.

    Links are followed, but each folder is visited once. Raises UserError if one cannot be listed.
    """
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(counts, folders))
        for name in filter(counts, names):
            yield (Path(folder) / name).relative_to(root).as_posix()


def _raise(error: OSError) -> None:
    raise _cannot_list(error)


def _cannot_list(error: OSError) -> UserError:
    return UserError(
        f"{error.filename} cannot be listed: {error.strerror}; its images would be missing, and"
        " classes would have other numbers"
    )


def has_image_suffix(name: str) -> bool:
    """Return whether a file has the name of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def looks_like_image(start: bytes) -> bool:
    """Return whether a file starts, in its first `START_BYTES`, as an image does."""
    return _IMAGE_START.match(start) is not None


def is_image(path: Path) -> bool:
    """Return whether a file is an image by its name or content; True if it cannot be read."""
    if has_image_suffix(path.name):
        return True
    if not path.is_file():  # opening a pipe would block
        return False
    try:
        with path.open("rb") as file:
            return looks_like_image(file.read(START_BYTES))
    except OSError:
        return True


def holds_image(folder: Path) -> bool:
    """Return whether there is an image anywhere below a folder. Raises UserError."""
    try:
        # Do not list all of a class with many images.
        with os.scandir(folder) as entries:
            for entry in entries:
                if counts(entry.name) and has_image_suffix(entry.name) and not entry.is_dir():
                    return True
    except OSError as error:
        raise _cannot_list(error) from None
    unknown = []
    for name in walk_files(folder):
        if has_image_suffix(name):
            return True
        unknown.append(name)
    return any(is_image(folder / name) for name in unknown)


@dataclass(frozen=True)
class Contents:
    """The direct contents of a folder, by name.

    Attributes:
        image_folders: folders with images at any depth.
        other_folders: all other folders.
        tars: uncompressed tars.
        images: files with the name of an image.
        others: all other files.
    """

    image_folders: tuple[str, ...]
    other_folders: tuple[str, ...]
    tars: tuple[str, ...]
    images: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def compressed_tars(self) -> tuple[str, ...]:
        """The names of tars that must be unpacked first."""
        return tuple(name for name in self.others if name.lower().endswith(COMPRESSED_TARS))

    @property
    def parquet_files(self) -> tuple[str, ...]:
        """The names of Parquet files."""
        return tuple(name for name in self.others if name.lower().endswith(".parquet"))

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """List a folder. Raises UserError if it, or one in it, cannot be listed."""
        entries = list_folder(folder)
        folders = [entry.name for entry in entries if entry.is_dir()]
        files = [entry.name for entry in entries if not entry.is_dir()]
        with_images = [name for name in folders if holds_image(folder / name)]
        tars = [name for name in files if name.lower().endswith(".tar")]
        images = [name for name in files if has_image_suffix(name)]
        return cls(
            tuple(with_images),
            tuple(name for name in folders if name not in with_images),
            tuple(tars),
            tuple(images),
            tuple(name for name in files if name not in {*tars, *images}),
        )


def why_no_images(root: Path) -> str:
    """Explain a folder without images: what it holds instead, and what to do."""
    contents = Contents.of(root)
    if contents.compressed_tars:
        return f"{root / contents.compressed_tars[0]} is a compressed tar: unpack it first"
    for name in contents.other_folders:
        inner = Contents.of(root / name)
        for files, kind in ((inner.tars, "tar"), (inner.parquet_files, "Parquet file")):
            if files:
                count = counted(len(files), kind)
                return f"{root} has no images; its folder {name} has {count}: give {root / name}"
    others = sum(1 for _ in walk_files(root))
    if not others:
        return f"{root} is empty: give a folder of images"
    return f"{root} has no images, only {counted(others, 'other file')}: give a folder of images"
