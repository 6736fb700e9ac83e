"""ILSVRC2012 as distributed: the tar of tars, the flat validation set, and its ground truth.

Names are the same in every layout (`n01440764/n01440764_10026.JPEG`), so a tar and a folder with
the same images give the same shards. Validation images are identified by number only; their labels
are converted to names of synsets (`n01440764`), and a label is the index of its synset among the
sorted names, as in the folders of the training set.
"""

from __future__ import annotations

import csv
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

from data_tools.sources import (
    CUT_OFF,
    FileSource,
    SourceFile,
    label_by_folder,
    list_images,
    number_classes,
    printable,
)
from data_tools.tars import BrokenTarError, Stretch, tar_members, why_not
from megavis.config.errors import UserError

VALIDATION_START = "ILSVRC2012_val_"
_NO_LABEL = "not in the ground truth"
_NO_CLASS_TAR = "not the tar of a class"
_WHOLE_FILE = "."  # the root of a source in one tar is that tar
KAGGLE_TRUTH = "LOC_val_solution.csv"
KAGGLE_CLASSES = "LOC_synset_mapping.txt"
_KIT = "ILSVRC2012_devkit_t12"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_META = "meta.mat"
_NUMBER = re.compile(r"_(\d+)\.[A-Za-z]+$")
# Kaggle's table is four folders above its images.
_LEVELS = 4


def train_tar(path: Path, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List `ILSVRC2012_img_train.tar`, a tar with one tar per class, without unpacking it.

    Every header is read once (one seek per image); images are later read at their offsets. A
    damaged class tar yields the images before the damage, and is reported. Raises UserError and
    OSError.
    """
    files: list[SourceFile] = []
    with path.open("rb") as file:
        try:
            for outer in tar_members(file):
                files += _class_tar(file, outer)
        except BrokenTarError as error:
            files.append(SourceFile(path.name, -1, 0, _WHOLE_FILE, refused=str(error)))
    if not any("/" in file.name for file in files):
        raise UserError(f"{path} has no class tars such as n01440764.tar")
    return label_by_folder(
        files, description=f"ImageNet train tar {path.name}", root=path, class_names=class_names
    )


def _class_tar(file: BinaryIO, outer: tarfile.TarInfo) -> Iterator[SourceFile]:
    """Yield the images of one class tar."""
    name, suffix = os.path.splitext(outer.name.split("/")[-1])
    if suffix != ".tar" or not outer.isreg():
        yield SourceFile(printable(outer.name), -1, outer.size, _WHOLE_FILE, refused=_NO_CLASS_TAR)
        return
    inner = cast(BinaryIO, Stretch(file, start=outer.offset_data, length=outer.size))
    try:
        for member in tar_members(inner):
            whole = member.offset_data + member.size <= outer.size
            picture = _member(member, folder=f"{name}/", start=outer.offset_data)
            yield picture.but_refused("" if whole else CUT_OFF)
    except BrokenTarError as error:
        refused = str(error)
        yield SourceFile(
            printable(f"{name}/{name}.tar"), -1, outer.size, _WHOLE_FILE, refused=refused
        )


def _member(member: tarfile.TarInfo, *, folder: str = "", start: int = 0) -> SourceFile:
    return SourceFile(
        printable(folder + member.name.split("/")[-1]),
        -1,
        member.size,
        _WHOLE_FILE,
        start + member.offset_data,
        why_not(member),
    )


def validation(
    root: Path, *, truth: GroundTruth, class_names: Sequence[str] | None = None
) -> FileSource:
    """List the flat validation set, a tar or a folder, with labels from its ground truth.

    `class_names` are those of the training set, if they differ from those of `truth`. Raises
    UserError if a class is not among them or the ground truth does not match the images, and
    OSError.
    """
    known = truth.class_names if class_names is None else class_names
    files = flat_files(root).files
    classes = {file.name: name for file in files if (name := truth.class_of(file.name)) is not None}
    if not classes:
        raise UserError(f"no image of {root} is in the ground truth {truth.path}")
    number = number_classes(sorted(set(classes.values())), known, root=truth.path)
    labelled = (
        replace(file, label=number[classes[file.name]])
        if file.name in classes
        else file.but_refused(_NO_LABEL)
        for file in files
    )
    return FileSource.of(
        labelled,
        description=f"ImageNet validation set {root.name}",
        root=root,
        classes=list(number),
        # Labels are part of the identity, which otherwise has only names and sizes.
        extra=" ".join(name for _, name in sorted(classes.items())),
    )


def flat_files(root: Path) -> FileSource:
    """List the flat validation set, a tar or a folder, without labels."""
    if root.is_dir():
        return list_images(root)
    description = f"ImageNet validation tar {root.name}"
    return FileSource.of(_flat_tar(root), description=description, root=root, classes=())


def _flat_tar(path: Path) -> Iterator[SourceFile]:
    with path.open("rb") as file:
        try:
            for member in tar_members(file):
                yield _member(member)
        except BrokenTarError as error:
            yield SourceFile(path.name, -1, 0, _WHOLE_FILE, refused=str(error))


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
