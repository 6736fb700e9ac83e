"""Open a source from the command line, detecting its layout."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from data_tools.imagenet import (
    KAGGLE_TRUTH,
    VALIDATION_START,
    find_truth,
    flat_files,
    read_truth,
    train_tar,
    validation,
)
from data_tools.labelled.data_set import OFFICIAL_SPLITS, TEST, VALIDATION
from data_tools.labelled.table import DATA_SETS
from data_tools.selection import SPLITS, ImageSelection, Split, check_made_for, open_selection
from data_tools.sources import FileSource, ImageSource, SourceFile, list_images
from data_tools.tars import first_member, is_tar, list_tars
from megavis.config.errors import UserError, counted
from megavis.data.format.manifest import MANIFEST_NAME, Manifest
from megavis.data.format.shards import ShardReader

KAGGLE_TREE = Path("ILSVRC/Data/CLS-LOC")
LAYOUTS = (
    "auto",
    "folder",
    "imagenet-train-tar",
    "imagenet-validation",
    "kaggle-train",
    "kaggle-validation",
    "webdataset",
    "jpeg-shards",
    *DATA_SETS,
)
_URL_LISTS = (".parquet", ".csv", ".tsv", ".txt", ".json", ".jsonl", ".gz")
# Defaults for layouts that share a folder.
_PREFERRED = ("caltech-101",)


def add_source_arguments(parser: argparse.ArgumentParser, *, selects: bool = True) -> None:
    """Add the options that choose the source and its images."""
    parser.add_argument(
        "source",
        type=Path,
        help="an image folder (the first folder on the path to a file is its class), "
        "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or its folder, the root of Kaggle's "
        "ILSVRC (its training set), webdataset tars (a folder of them, one, or a pattern such as "
        "'web/{00000..00123}.tar'), a folder of jpeg shards, or a labelled data set as published: "
        f"{', '.join(DATA_SETS)}",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="of the source")
    parser.add_argument(
        "--ground-truth",
        type=Path,
        help="labels of ImageNet's flat validation set, if they are not next to it: "
        f"ILSVRC2012_devkit_t12 (folder or .tar.gz), Kaggle's {KAGGLE_TRUTH}, or a text file of "
        "class names",
    )
    add_classes_argument(parser)
    if selects:
        _add_selection_arguments(parser)
    else:
        parser.set_defaults(split="all", validation_share=0.04, selection=None, only_classes=None)


def add_classes_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for `read_class_names`."""
    parser.add_argument(
        "--classes-from",
        type=Path,
        help="a shard folder whose class numbers to use, or a text file, one class name per line",
    )


def _add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        choices=(*SPLITS, *OFFICIAL_SPLITS),
        default="all",
        help="train, validation: the official split of a labelled data set, or else a split by a "
        "hash of the names; all: both; test, extra, unlabeled: official splits of a labelled "
        "data set",
    )
    parser.add_argument(
        "--validation-share", type=float, default=0.04, help="of --split; default: as in iGPT"
    )
    parser.add_argument(
        "--only-classes",
        type=Path,
        metavar="FILE",
        help="keep only these classes, one name per line, such as the 100 synsets of ImageNet-100",
    )
    parser.add_argument(
        "--selection", type=Path, metavar="FOLDER", help="skip images that `filter` dropped"
    )


def open_source(arguments: argparse.Namespace) -> ImageSource:
    """Open the source chosen by `add_source_arguments`. Raises UserError and OSError."""
    selection = open_selection(arguments.split, arguments.validation_share, arguments.selection)
    classes = read_class_names(arguments.classes_from)
    place: Path = arguments.source
    layout = arguments.layout
    if layout == "auto":
        layout = "imagenet-validation" if arguments.ground_truth else find_layout(place)
    selection = replace(selection, split=_hash_split(layout, arguments.split))
    only = _read_names(arguments.only_classes, "--only-classes")
    if only is not None and (classes is not None or layout == "webdataset"):
        raise UserError(
            "--only-classes numbers the classes in order of their names: remove --classes-from"
            if classes is not None
            else f"--only-classes: {place} was read as webdataset tars, whose classes are not known"
            " before they are read; set --layout if that is wrong"
        )
    if layout == "webdataset":
        check_made_for(selection, list_tars(place, selection=ImageSelection()).sha256)
        return list_tars(place, selection=selection, class_names=classes)
    if layout.startswith("kaggle"):
        place = _kaggle_folder(place, layout)
    if layout in ("imagenet-validation", "kaggle-validation"):
        source = _validation(place, arguments.ground_truth, classes)
    elif layout in DATA_SETS:
        source = DATA_SETS[layout].open(place, arguments.split, class_names=classes)
    else:
        source = _FILE_LAYOUTS[layout](place, class_names=classes)
    check_made_for(selection, source.sha256)
    source = source if only is None else keep_classes(source, only, arguments.only_classes)
    return selection.of_files(source)


def keep_classes(source: FileSource, names: Sequence[str], listed_in: Path) -> FileSource:
    """Return the images of some classes, numbered in order of their names.

    Prints how many of how many are kept. Raises UserError if the source lacks a class.
    """
    if missing := sorted(set(names) - set(source.class_names)):
        raise UserError(
            f"--only-classes {listed_in}: {source.root} has no class {missing[0]!r}; it has"
            f" {counted(len(source.class_names), 'class', 'classes')}, such as"
            f" {', '.join(source.class_names[:3]) or 'none'}"
        )
    number = {name: label for label, name in enumerate(sorted(names))}
    labels = {old: number.get(name) for old, name in enumerate(source.class_names)}
    kept = [
        replace(file, label=label)
        for file in source.files
        if (label := labels.get(file.label)) is not None
    ]
    sys.stdout.write(
        f"{len(number)} of {counted(len(source.class_names), 'class', 'classes')},"
        f" {len(kept)} of {counted(len(source.files), 'file')} are kept\n"
    )
    return FileSource.of(
        kept,
        description=f"{source.description}, {counted(len(number), 'class', 'classes')}",
        root=source.root,
        classes=list(number),
        read=source.read,
    )


def _hash_split(layout: str, split: str) -> Split:
    """Return the split to make by a hash of the names, given the official splits of a layout."""
    if layout in DATA_SETS and (VALIDATION in DATA_SETS[layout].sizes or split in OFFICIAL_SPLITS):
        return "all"
    if split in OFFICIAL_SPLITS:
        raise UserError(
            f"--split {split}: only a labelled data set has one, and the source was read as"
            f" {layout}; set --layout if that is wrong"
        )
    return cast(Split, split)


def open_unlabelled(place: Path) -> ImageSource:
    """Open a source without labels; of a labelled data set its test set."""
    layout = find_layout(place)
    if layout in DATA_SETS:
        return DATA_SETS[layout].open(place, TEST, class_names=None)
    if layout == "webdataset":
        return list_tars(place, selection=ImageSelection())
    if layout == "imagenet-validation":
        return flat_files(place)
    return _FILE_LAYOUTS[layout](_kaggle_folder(place, layout))


def find_layout(place: Path) -> str:
    """Detect the layout of a path. Raises UserError if it has none that is known, and OSError."""
    if place.is_dir():
        return _folder_layout(place)
    if "{" in str(place) and not place.exists():
        return "webdataset"
    if not place.is_file():
        raise UserError(f"{place} does not exist: give a folder of images, or a tar")
    _refuse_url_list(place)
    if not is_tar(place):
        raise UserError(
            f"{place} is not an uncompressed tar: give a folder of images, or a tar (unpack a "
            "compressed one first)"
        )
    first = first_member(place)
    if first.endswith(".tar"):
        return "imagenet-train-tar"
    return "imagenet-validation" if _is_validation(first) else "webdataset"


def _folder_layout(place: Path) -> str:
    if (place / MANIFEST_NAME).is_file():
        return "jpeg-shards"
    if (place / KAGGLE_TREE).is_dir():
        return "kaggle-train"
    found = [name for name, data_set in DATA_SETS.items() if data_set.lies_at(place)]
    if len(found) > 1 and found[0] not in _PREFERRED:
        raise UserError(f"{place} has labels for {' and '.join(found)}: choose one with --layout")
    if found:
        return found[0]
    entries = sorted(place.iterdir())
    if any(path.is_dir() for path in entries):
        return "folder"
    if any(path.suffix == ".tar" for path in entries):
        return "webdataset"
    if any(_is_validation(path.name) for path in entries):
        return "imagenet-validation"
    if entries and all(path.name.endswith(_URL_LISTS) for path in entries):
        _refuse_url_list(entries[0])
    return "folder"


def _is_validation(name: str) -> bool:
    return name.split("/")[-1].startswith(VALIDATION_START)


def _refuse_url_list(path: Path) -> None:
    if path.name.endswith(_URL_LISTS) and not path.name.endswith(".tar.gz"):
        kind = path.name.split(".", 1)[1]
        raise UserError(
            f"{path} is not an image; if it lists URLs, download them with `img2dataset --url_list "
            f"{path} --input_format {kind} --url_col url --output_format webdataset "
            "--resize_mode no --output_folder web`, then give the folder web"
        )


def _kaggle_folder(place: Path, layout: str) -> Path:
    if (place / KAGGLE_TREE).is_dir():
        return place / KAGGLE_TREE / ("train" if layout == "kaggle-train" else "val")
    return place


def _validation(place: Path, truth: Path | None, classes: Sequence[str] | None) -> FileSource:
    if not place.exists():
        raise UserError(f"{place} does not exist: give ImageNet's validation tar or folder")
    truth = truth or find_truth(place)
    if truth is None:
        raise UserError(
            f"{place} has ImageNet's validation images, whose labels are elsewhere: "
            "give --ground-truth, or --layout folder for no labels"
        )
    return validation(place, truth=read_truth(truth), class_names=classes)


def list_jpeg_shards(folder: Path, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List the images of a finished folder written by `jpeg`, with the names of their source.

    Raises UserError if it is unfinished or has no images, or `class_names` differ.
    """
    manifest = Manifest.read(folder)
    if manifest.kind != "jpeg":
        raise UserError(f"{folder} holds {manifest.kind} shards, which are not images")
    if class_names is not None and tuple(class_names) != manifest.class_names:
        raise UserError(f"{folder} has other classes than --classes-from: remove the option")
    return FileSource.of(
        _shard_files(folder, manifest),
        description=f"jpeg shards {folder.name}",
        root=folder,
        classes=manifest.class_names,
    )


def _shard_files(folder: Path, manifest: Manifest) -> Iterator[SourceFile]:
    indexes = [ShardReader(folder / shard.name).index for shard in manifest.shards]
    # A source may have several crops, and merged folders may have equal names.
    uses = Counter(source for index in indexes for source in index.sources)
    for index in indexes:
        columns = (index.keys, index.sources, index.labels, index.lengths, index.offsets)
        for key, source, label, length, offset in zip(*columns, strict=True):
            name = source if uses[source] == 1 else f"{source}#{key}"
            yield SourceFile(name, label, length, index.shard, offset)


def read_class_names(place: Path | None) -> tuple[str, ...] | None:
    """Return the class names of `--classes-from`, or None. Raises UserError."""
    if place is None or place.is_dir():
        return Manifest.read(place).class_names if place else None
    return _read_names(place, "--classes-from")


def _read_names(place: Path | None, option: str) -> tuple[str, ...] | None:
    """Return the class names in a text file, or None without one. Raises UserError."""
    if place is None:
        return None
    try:
        names = tuple(line.strip() for line in place.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {place} cannot be read: {error}") from None
    if not names or len(set(names)) < len(names):
        raise UserError(f"{option} {place} must have one class name per line, each once")
    return names


_FILE_LAYOUTS: Mapping[str, Callable[..., FileSource]] = {
    "folder": list_images,
    "kaggle-train": list_images,
    "imagenet-train-tar": train_tar,
    "jpeg-shards": list_jpeg_shards,
}
