"""A labelled data set: official splits, classes, and a list of labelled images.

A reader lists one split without decoding anything. Images stored as raw pixels in a larger file are
passed on as PPM, which every verb decodes to the same pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import TRUNCATED, RefusedImageError
from data_tools.job_report import say
from data_tools.sources import FileSource, Reading, SourceFile
from megavis.config.errors import UserError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
EXTRA, UNLABELED = "extra", "unlabeled"
OFFICIAL_SPLITS = (TEST, EXTRA, UNLABELED)
"""Splits that only labelled data sets have; any source can be split into the others."""


@dataclass(frozen=True)
class Listing:
    """The images of one split.

    Attributes:
        class_names: indexed by label; the same for all splits.
        files: in any order, with labels; -1 in splits without labels.
        read: function that reads an image's bytes.
    """

    class_names: Sequence[str]
    files: Sequence[SourceFile]
    read: Reading = SourceFile.read


@dataclass(frozen=True)
class LabelledSet:
    """A data set with official splits, in a supported format.

    Attributes:
        name: name, as in `--layout`.
        markers: groups of files or folders, or patterns of their names; a folder with all of one
            group has this data set.
        sizes: published number of images in each split.
        list_split: lists one split of the data set at a path. Raises UserError if a file is
            missing, has the wrong size, or another format.
        is_at: distinguishes data sets whose files have the same names.
    """

    name: str
    markers: Sequence[Sequence[str]]
    sizes: Mapping[str, int]
    list_split: Callable[[Path, str], Listing]
    is_at: Callable[[Path], bool] = lambda root: True

    def lies_at(self, root: Path) -> bool:
        """Return whether a folder has this data set."""
        marked = any(all(any(root.glob(name)) for name in group) for group in self.markers)
        return marked and self.is_at(root)

    def parts_of(self, split: str) -> tuple[str, ...]:
        """Return the official splits for a value of `--split`. Raises UserError for others.

        `all` is everything that may be used for training. Without an official validation set,
        the caller splits the training set into `train` and `validation`.
        """
        trained = tuple(part for part in (TRAIN, VALIDATION) if part in self.sizes)
        if split == "all" or (split == VALIDATION and split not in self.sizes):
            return trained
        if split not in self.sizes:
            raise UserError(f"{self.name} has no split {split!r}, only {', '.join(self.sizes)}")
        return (split,)

    def open(self, root: Path, split: str, *, class_names: Sequence[str] | None) -> FileSource:
        """Return the images of the official splits for a value of `--split`.

        `root` is the unpacked folder; `class_names`, of `--classes-from`, must match the data
        set. Raises UserError if a file is missing, has the wrong size or is damaged, or a label is
        invalid, and OSError.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: give the unpacked folder of {self.name}")
        parts = self.parts_of(split)
        listings = [self.list_split(root, part) for part in parts]
        files = [file for listing in listings for file in listing.files]
        classes = tuple(listings[0].class_names)
        _check_labels(root, files, len(classes), lowest=-1 if parts == (UNLABELED,) else 0)
        if class_names is not None and tuple(class_names) != classes:
            raise UserError(f"{self.name} has other classes than --classes-from: remove the option")
        return FileSource.of(
            files,
            description=self._describe(parts, len(files)),
            root=root,
            classes=classes,
            extra=f"{self.name} " + " ".join(str(file.label) for file in files),
            read=listings[0].read,
        )

    def _describe(self, parts: Sequence[str], found: int) -> str:
        published = sum(self.sizes[part] for part in parts)
        description = f"{self.name}, {' and '.join(parts)} set"
        if found == published:
            return description
        description += f", {found} of {published} pictures"
        say(f"{description}: results will not be comparable with published ones")
        return description


def _check_labels(
    root: Path, files: Iterable[SourceFile], num_classes: int, *, lowest: int
) -> None:
    for file in files:
        if not lowest <= file.label < num_classes:
            raise UserError(
                f"{root / (file.path or file.name)}: the label of {file.name} is number"
                f" {file.label}, counted from 0, and there are {num_classes} classes"
            )


def image_file(root: Path, name: str, label: int, *, listed_in: str) -> SourceFile:
    """Return a listed image by its path below `root`; raises UserError if it is not readable."""
    try:
        size = (root / name).stat().st_size
    except FileNotFoundError:
        raise UserError(f"{root / name} is missing, but listed in {listed_in}") from None
    except OSError as error:
        raise UserError(f"{root / name} cannot be read: {error.strerror}") from None
    return SourceFile(name, label, size)


@functools.lru_cache(maxsize=2)
def hdf5_array(path: Path, name: str, *, wanted: str) -> Any:
    """Return an array of an HDF5 file, read on access. Raises UserError."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{path} needs h5py: pip install 'megavis[hdf5]'") from None
    try:
        return h5py.File(path, "r")[name]
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, KeyError):
        raise UserError(f"{path} is missing, or not {wanted}") from None


def read_whole(file: SourceFile, root: Path) -> bytes:
    """Read raw pixels. Raises RefusedImageError if their file is truncated, and OSError."""
    content = file.read(root)
    if len(content) < file.num_bytes:
        raise RefusedImageError(TRUNCATED)
    return content


def ppm(pixels: np.ndarray) -> bytes:
    """Encode pixels uint8 `[h, w, 3]` as a PPM file, losslessly."""
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
