"""The ground truth of ImageNet's flat validation set, in each form in which it is distributed."""

from __future__ import annotations

import csv
import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megavis.config.errors import UserError

KAGGLE_TRUTH = "LOC_val_solution.csv"
KAGGLE_CLASSES = "LOC_synset_mapping.txt"
_KIT = "ILSVRC2012_devkit_t12"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_META = "meta.mat"
_NUMBER = re.compile(r"_(\d+)\.[A-Za-z]+$")
# Kaggle's table is four folders above its images.
_LEVELS = 4


@dataclass(frozen=True)
class GroundTruth:
    """Classes of the validation images.

    Attributes:
        path: source of the labels.
        class_names: sorted names of all classes.
        by_number: class of image number i + 1.
        by_stem: class by file name without suffix, as in Kaggle's table.
    """

    path: Path
    class_names: tuple[str, ...]
    by_number: tuple[str, ...] = ()
    by_stem: dict[str, str] = field(default_factory=dict)

    def class_of(self, name: str) -> str | None:
        """Return the class of an image, or None if its name has no number.

        Raises UserError if the list ends before its number.
        """
        if self.by_stem:
            return self.by_stem.get(Path(name).stem)
        match = _NUMBER.search(name)
        if not match or int(match[1]) < 1:
            return None
        if int(match[1]) > len(self.by_number):
            raise UserError(
                f"{self.path} has {len(self.by_number)} labels, but there is an image {name}: "
                "the list is truncated or belongs to another data set"
            )
        return self.by_number[int(match[1]) - 1]


def find_truth(place: Path) -> Path | None:
    """Return the ground truth next to the images, or above them as in Kaggle's tree."""
    for folder in place.resolve().parents[:_LEVELS]:
        for name in (KAGGLE_TRUTH, _KIT, f"{_KIT}.tar.gz", _TRUTH):
            if (folder / name).exists():
                return folder / name
    return None


def read_truth(path: Path) -> GroundTruth:
    """Read the classes of the validation images.

    From the development kit (`ILSVRC2012_devkit_t12`: a folder, its .tar.gz, or the list with its
    meta.mat next to it), Kaggle's `LOC_val_solution.csv`, or a text file with one class name per
    line, in order of the images' numbers. Raises UserError for all else.
    """
    try:
        return _read(path)
    except (OSError, UnicodeDecodeError, tarfile.TarError, EOFError) as error:
        raise UserError(f"the ground truth {path} cannot be read: {error}") from None


def _read(path: Path) -> GroundTruth:
    if path.is_dir():
        data = path / "data" if (path / "data").is_dir() else path
        return _from_kit(path, (data / _META).read_bytes(), (data / _TRUTH).read_text())
    if path.name.endswith((".tar.gz", ".tgz")):
        return _from_kit_tar(path)
    text = path.read_text()
    if text.startswith("ImageId,"):
        return _from_kaggle(path, text)
    lines = text.split()
    if not lines or not all(line.isdigit() for line in lines):
        return GroundTruth(path, tuple(sorted(set(lines))), tuple(lines))
    meta = path.with_name(_META)
    if not meta.is_file():
        raise UserError(
            f"{path} numbers the classes in an order of its own: put {_META} of the development "
            f"kit next to it, or give the whole kit, {_KIT}"
        )
    return _from_kit(path, meta.read_bytes(), text)


def _from_kaggle(path: Path, text: str) -> GroundTruth:
    by_stem = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        words = (row.get("PredictionString") or "").split()
        if not words:
            raise UserError(f"{path} line {number} has no class: the file is truncated or damaged")
        by_stem[row["ImageId"]] = words[0]
    classes = sorted(set(by_stem.values()))
    mapping = path.with_name(KAGGLE_CLASSES)
    if mapping.is_file():
        classes = sorted(line.split()[0] for line in mapping.read_text().splitlines() if line)
        _check_known(path, classes, list(by_stem.values()), first_line=2)
    return GroundTruth(path, tuple(classes), by_stem=by_stem)


def _from_kit_tar(path: Path) -> GroundTruth:
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as kit:
        for member in kit:
            name = member.name.split("/")[-1]
            file = kit.extractfile(member) if name in (_META, _TRUTH) else None
            if file is not None:
                contents[name] = file.read()
    if len(contents) < 2:
        raise UserError(f"{path} holds no {_META} and {_TRUTH}: give the kit of tasks 1 and 2")
    return _from_kit(path, contents[_META], contents[_TRUTH].decode())


def _from_kit(path: Path, meta: bytes, truth: str) -> GroundTruth:
    """Convert the kit's ids, which start at 1 and have an order of their own."""
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        # Inner nodes of the tree have ids too; images belong to leaves.
        names = {
            str(int(entry["ILSVRC2012_ID"])): str(entry["WNID"])
            for entry in synsets
            if int(entry["num_children"]) == 0
        }
    except Exception as error:
        # scipy raises almost any exception on damaged bytes.
        raise UserError(f"{_META} of {path} cannot be read: {error}") from None
    numbers = truth.split()
    _check_known(path, list(names), numbers, first_line=1)
    return GroundTruth(
        path, tuple(sorted(names.values())), tuple(names[number] for number in numbers)
    )


def _check_known(
    path: Path, known: Sequence[str], found: Sequence[str], *, first_line: int
) -> None:
    places = set(known)
    for line, name in enumerate(found, first_line):
        if name not in places:
            raise UserError(
                f"{path}: label {name!r} of line {line} is not among the {len(places)} classes"
            )
