"""The ground truth of ImageNet's flat validation set, in each form in which it is distributed.

A list without names labels images by the numbers in their names, so one line too many shifts every
label. Therefore it must have as many lines as there are images, or as ImageNet has.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_tools.user_text import lines_of, numbered_lines, read_table, read_text, text_of
from megavis.config.errors import UserError, counted
from megavis.data.format.folders import IMAGE_SUFFIXES

KAGGLE_TRUTH = "LOC_val_solution.csv"
KAGGLE_CLASSES = "LOC_synset_mapping.txt"
_KIT = "ILSVRC2012_devkit_t12"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_META = "meta.mat"
_TRUTHS = (KAGGLE_TRUTH, _KIT, f"{_KIT}.tar.gz", _TRUTH)
_NUMBER = re.compile(r"_(\d+)\.[A-Za-z]+$")
_BETWEEN_WORDS = re.compile(r"[\s,]+")
_KAGGLE_COLUMNS = ("ImageId", "PredictionString")
_WHOLE_SET = 50_000
# Kaggle's table is in the folder of this one.
_TREE = ("ILSVRC", "Data", "CLS-LOC")

# A line's number and words.
Row = tuple[int, list[str]]


@dataclass(frozen=True)
class GroundTruth:
    """Classes of the validation images.

    Attributes:
        path: source of the labels.
        class_names: names of all classes, sorted unless `--classes-from` numbers them.
        by_number: class of image number i + 1.
        by_stem: class by file name without suffix.
        header: first line of a list, which is perhaps a header; empty if it cannot be one.
    """

    path: Path
    class_names: tuple[str, ...]
    by_number: tuple[str, ...] = ()
    by_stem: dict[str, str] = field(default_factory=dict)
    header: str = ""

    def classes_of(self, names: Sequence[str], *, root: Path) -> dict[str, str]:
        """Return the class of each image that has one.

        Args:
            names: names of the images.
            root: where they are, for errors.

        Raises:
            UserError: the list belongs to other images, or its first line is a header.
        """
        if self.by_stem:
            return self._by_name(names, root)
        numbers = {name: int(match[1]) for name in names if (match := _NUMBER.search(name))}
        numbers = {name: number for name, number in numbers.items() if number > 0}
        last = max(numbers, key=lambda name: numbers[name], default="")
        if last and numbers[last] > len(self.by_number):
            raise UserError(
                f"{self.path} has {len(self.by_number)} labels, but there is an image {last}: "
                "the list is truncated or belongs to another data set"
            )
        if numbers and len(self.by_number) not in (len(numbers), _WHOLE_SET):
            may_be_header = self.header and len(self.by_number) == len(numbers) + 1
            hint = f"; is line 1, {self.header!r}, a header?" if may_be_header else ""
            raise UserError(
                f"{self.path} has {len(self.by_number)} labels, and {root}"
                f" {counted(len(numbers), 'image')}: give one label a line for each image, or lines"
                f" of name and label{hint}"
            )
        return {name: self.by_number[number - 1] for name, number in numbers.items()}

    def _by_name(self, names: Sequence[str], root: Path) -> dict[str, str]:
        stems = {name: _stem(name) for name in names}
        if self._first_is_header(set(stems.values())):
            raise UserError(
                f"{self.path} line 1: {self.header!r} is not an image of {root}; if the line is a"
                " header, remove it"
            )
        return {name: self.by_stem[stem] for name, stem in stems.items() if stem in self.by_stem}

    def _first_is_header(self, stems: Collection[str]) -> bool:
        """Return whether the first line of names and labels is probably a header.

        A header names no image here. Neither may the first line of a list of the whole set, but
        then its name has a digit or a suffix, and other images have the same class.
        """
        first = _stem(self.header)
        if not first or first in stems:
            return False
        alone = list(self.by_stem.values()).count(self.by_stem[first]) == 1
        return alone or not set(self.header) & set(".0123456789")


def _stem(name: str) -> str:
    """Return a file name without folders, and without the suffix of an image."""
    base = name.rsplit("/", 1)[-1]
    root, suffix = os.path.splitext(base)
    return root if suffix.lower() in IMAGE_SUFFIXES else base


def find_truth(place: Path) -> Path | None:
    """Return the ground truth next to or among the images, or above them in Kaggle's tree.

    In any other tree, a list in a parent folder may belong to other images.
    """
    folders = place.resolve().parents
    in_tree = [folder for folder in folders if folder.parts[-len(_TREE) :] == _TREE]
    levels = folders.index(in_tree[0]) + len(_TREE) + 1 if in_tree else 1
    for folder in (*[place] * place.is_dir(), *folders[:levels]):
        for name in _TRUTHS:
            if (folder / name).exists():
                return folder / name
    return None


def read_truth(path: Path, class_names: Sequence[str] | None = None) -> GroundTruth:
    """Read the classes of the validation images.

    From the development kit (`ILSVRC2012_devkit_t12`: a folder, its .tar.gz, or the list with its
    meta.mat next to it), Kaggle's `LOC_val_solution.csv`, a text file with one class name per line,
    in order of the images' numbers, or one with an image's name and its class per line.

    Args:
        path: the ground truth.
        class_names: of `--classes-from`; the classes that numbers after names count, from 0.

    Raises:
        UserError: the file has none of these forms; names the line.
    """
    try:
        return _read(path, class_names)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise UserError(f"the ground truth {path} cannot be read: {error}") from None


def _read(path: Path, class_names: Sequence[str] | None) -> GroundTruth:
    if path.is_dir():
        data = path / "data" if (path / "data").is_dir() else path
        return _from_kit(path, (data / _META).read_bytes(), read_text(data / _TRUTH))
    if path.name.endswith((".tar.gz", ".tgz")):
        return _from_kit_tar(path)
    text = read_text(path)
    if text.lstrip().lstrip('"').startswith(_KAGGLE_COLUMNS[0]):
        return _from_kaggle(path)
    rows = _rows(path, text)
    if len(rows[0][1]) == 2:
        return _from_names(path, rows, class_names)
    lines = [words[0] for _, words in rows]
    if not _are_numbers(path, rows):
        return GroundTruth(path, tuple(sorted(set(lines))), tuple(lines), header=lines[0])
    meta = path.with_name(_META)
    if not meta.is_file():
        raise UserError(
            f"{path} numbers the classes in an order of its own: put {_META} of the development "
            f"kit next to it, or give the whole kit, {_KIT}"
        )
    return _from_kit(path, meta.read_bytes(), text)


def _rows(path: Path, text: str) -> list[Row]:
    """Split a list into rows of equally many words, one or two. Raises UserError."""
    rows = [
        (number, [word for word in _BETWEEN_WORDS.split(line) if word])
        for number, line in lines_of(text)
    ]
    if not rows:
        raise UserError(f"{path} is empty")
    first = rows[0]
    for number, words in rows:
        found = counted(len(words), "word")
        if not 1 <= len(words) <= 2 and number == first[0]:
            raise UserError(
                f"{path} line {number} has {found}: give one label a line, or the name of an image"
                " and its label"
            )
        if len(words) != len(first[1]):
            raise UserError(
                f"{path} line {number} has {found}, and line {first[0]} has {len(first[1])}: give"
                " one label a line, or the name of an image and its label"
            )
    return rows


def _are_numbers(path: Path, rows: Sequence[Row]) -> bool:
    """Return whether all labels are numbers. Raises UserError if some are."""
    are = rows[-1][1][-1].isdecimal()
    for number, words in rows:
        if words[-1].isdecimal() != are:
            raise UserError(
                f"{path} line {number}: the label {words[-1]!r} is {'no' if are else 'a'} number,"
                f" unlike the label of line {rows[-1][0]}, {rows[-1][1][-1]!r}"
            )
    return are


def _from_names(path: Path, rows: Sequence[Row], class_names: Sequence[str] | None) -> GroundTruth:
    by_stem: dict[str, str] = {}
    places: dict[str, int] = {}
    numbered = _are_numbers(path, rows) and not (
        class_names is not None and {words[1] for _, words in rows} <= set(class_names)
    )
    for number, (name, label) in rows:
        stem = _stem(name)
        if stem in by_stem:
            raise UserError(f"{path} line {number}: {name!r} was on line {places[stem]} already")
        places[stem] = number
        by_stem[stem] = _numbered(path, number, label, class_names) if numbered else label
    classes = class_names if numbered and class_names else sorted(set(by_stem.values()))
    return GroundTruth(path, tuple(classes), by_stem=by_stem, header=rows[0][1][0])


def _numbered(path: Path, line: int, label: str, class_names: Sequence[str] | None) -> str:
    if class_names is None:
        raise UserError(
            f"{path} line {line}: {label!r} is a number, and the list does not say of which class:"
            " give the classes in its order, which are numbered from 0, with --classes-from"
        )
    if int(label) >= len(class_names):
        raise UserError(
            f"{path} line {line}: {label!r} is not the number of a class, 0 to"
            f" {len(class_names) - 1}"
        )
    return class_names[int(label)]


def _from_kaggle(path: Path) -> GroundTruth:
    by_stem = {}
    lines = []
    for number, row in read_table(path, _KAGGLE_COLUMNS):
        words = row["PredictionString"].split()
        if not words:
            raise UserError(f"{path} line {number} has no class: the file is truncated or damaged")
        by_stem[_stem(row["ImageId"])] = words[0]
        lines.append((number, words[0]))
    classes = sorted(set(by_stem.values()))
    mapping = path.with_name(KAGGLE_CLASSES)
    if mapping.is_file():
        classes = sorted(line.split()[0] for _, line in numbered_lines(mapping))
        _check_known(path, classes, lines)
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
    return _from_kit(path, contents[_META], text_of(contents[_TRUTH], path))


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
    lines = lines_of(truth)
    _check_known(path, list(names), lines)
    return GroundTruth(
        path, tuple(sorted(names.values())), tuple(names[number] for _, number in lines)
    )


def _check_known(path: Path, known: Sequence[str], lines: Sequence[tuple[int, str]]) -> None:
    places = set(known)
    for line, name in lines:
        if name not in places:
            raise UserError(
                f"{path}: label {name!r} of line {line} is not among the {len(places)} classes"
            )
