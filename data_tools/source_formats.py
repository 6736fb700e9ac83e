"""Open a source from the command line: detect which known layout a path has."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from data_tools.ground_truth import KAGGLE_TRUTH, find_truth, read_truth
from data_tools.image_folder import list_images
from data_tools.imagenet import VALIDATION_START, flat_files, train_tar, validation
from data_tools.labelled.data_set import OFFICIAL_SPLITS, TEST, VALIDATION
from data_tools.labelled.table import DATA_SETS
from data_tools.selection import SPLITS, ImageSelection, Split, check_made_for, open_selection
from data_tools.sources import FileSource, ImageSource, SourceFile
from data_tools.tars import first_member, is_tar
from data_tools.web_tars import list_tars
from megavis.config.errors import UserError
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


def add_source_arguments(parser: argparse.ArgumentParser, *, selects: bool = True) -> None:
    """Add the options that say where pictures come from, and which of them take part."""
    parser.add_argument(
        "source",
        type=Path,
        help="an image folder (the first folder on the way to a file is its class), "
        "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or its folder, the root of Kaggle's "
        "ILSVRC (its training set), webdataset tars (a folder of them, one, or a pattern such as "
        "'web/{00000..00123}.tar'), a folder of jpeg shards, or a labelled data set as its authors "
        f"publish it: {', '.join(DATA_SETS)}",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="of the source")
    parser.add_argument(
        "--ground-truth",
        type=Path,
        help="labels of ImageNet's flat validation set, where they are not next to it: "
        f"ILSVRC2012_devkit_t12 (folder or .tar.gz), Kaggle's {KAGGLE_TRUTH}, or a text file of "
        "class names",
    )
    add_classes_argument(parser)
    if selects:
        _add_selection_arguments(parser)
    else:
        parser.set_defaults(split="all", validation_share=0.04, selection=None)


def add_classes_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that `read_class_names` takes."""
    parser.add_argument(
        "--classes-from",
        type=Path,
        help="a shard folder whose class numbers to share, or a text file of one class name a line",
    )


def _add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        choices=(*SPLITS, *OFFICIAL_SPLITS),
        default="all",
        help="train, validation: the division of a labelled data set, or else what a hash of the "
        "name holds out for validation, and the rest; all: both; test, extra, unlabeled: of a "
        "labelled data set",
    )
    parser.add_argument(
        "--validation-share", type=float, default=0.04, help="of --split: iGPT holds out so much"
    )
    parser.add_argument(
        "--selection", type=Path, metavar="FOLDER", help="leave out what `filter` dropped"
    )


def open_source(arguments: argparse.Namespace) -> ImageSource:
    """Return the source that the options of `add_source_arguments` name.

    Raises:
        UserError: there is nothing, or nothing known, at the path; or the options do not fit it.
        OSError: it cannot be read.
    """
    selection = open_selection(arguments.split, arguments.validation_share, arguments.selection)
    classes = read_class_names(arguments.classes_from)
    place: Path = arguments.source
    layout = arguments.layout
    if layout == "auto":
        layout = "imagenet-validation" if arguments.ground_truth else find_layout(place)
    selection = replace(selection, split=_hash_split(layout, arguments.split))
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
    return selection.of_files(source)


def _hash_split(layout: str, split: str) -> Split:
    """Return what of `--split` is left to a hash of the names, the official division being made.

    Raises:
        UserError: the layout knows no such split.
    """
    if layout in DATA_SETS and (VALIDATION in DATA_SETS[layout].sizes or split in OFFICIAL_SPLITS):
        return "all"
    if split in OFFICIAL_SPLITS:
        raise UserError(
            f"--split {split}: only a labelled data set has one, and the source was read as"
            f" {layout}; --layout names what it is"
        )
    return cast(Split, split)


def open_unlabelled(place: Path) -> ImageSource:
    """Return the pictures at a path, whose labels do not matter; of a labelled data set its tests.

    Raises UserError and OSError.
    """
    layout = find_layout(place)
    if layout in DATA_SETS:
        return DATA_SETS[layout].open(place, TEST, class_names=None)
    if layout == "webdataset":
        return list_tars(place, selection=ImageSelection())
    if layout == "imagenet-validation":
        return flat_files(place)
    return _FILE_LAYOUTS[layout](_kaggle_folder(place, layout))


# Of the layouts that share a folder, what it is where nobody says another.
_PREFERRED = ("caltech-101",)


def find_layout(place: Path) -> str:
    """Return which layout lies at a path.

    Raises:
        UserError: there is nothing, or nothing known.
        OSError: it cannot be read.
    """
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
        raise UserError(f"{place} has labels for {' and '.join(found)}: say which by --layout")
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
            f"{path} is no picture; if it lists URLs, download them with `img2dataset --url_list "
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
            f"{place} holds ImageNet's validation pictures, whose labels lie elsewhere: "
            "give --ground-truth, or --layout folder to go without labels"
        )
    return validation(place, truth=read_truth(truth), class_names=classes)


def list_jpeg_shards(folder: Path, *, class_names: Sequence[str] | None = None) -> FileSource:
    """List the pictures of a folder that `jpeg` wrote; their names are those of its own source.

    Raises:
        UserError: it is unfinished or holds no pictures, or `class_names` are others.
    """
    manifest = Manifest.read(folder)
    if manifest.kind != "jpeg":
        raise UserError(f"{folder} holds {manifest.kind} shards, which are no pictures any more")
    if class_names is not None and tuple(class_names) != manifest.class_names:
        raise UserError(f"{folder} has other classes than --classes-from: leave that out")
    return FileSource.of(
        _shard_files(folder, manifest),
        description=f"jpeg shards {folder.name}",
        root=folder,
        classes=manifest.class_names,
    )


def _shard_files(folder: Path, manifest: Manifest) -> Iterator[SourceFile]:
    for shard in manifest.shards:
        index = ShardReader(folder / shard.name).index
        crops = Counter(index.sources)
        columns = (index.keys, index.sources, index.labels, index.lengths, index.offsets)
        for key, source, label, length, offset in zip(*columns, strict=True):
            name = source if crops[source] == 1 else f"{source}#{key}"
            yield SourceFile(name, label, length, shard.name, offset)


def read_class_names(place: Path | None) -> tuple[str, ...] | None:
    """Return the class names that `--classes-from` names; None where it is absent.

    Raises:
        UserError: they cannot be read, or one is there twice.
    """
    if place is None or place.is_dir():
        return Manifest.read(place).class_names if place else None
    try:
        names = tuple(line.strip() for line in place.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--classes-from {place} cannot be read: {error}") from None
    if not names or len(set(names)) < len(names):
        raise UserError(f"--classes-from {place} must hold one class name a line, each once")
    return names


_FILE_LAYOUTS: Mapping[str, Callable[..., FileSource]] = {
    "folder": list_images,
    "kaggle-train": list_images,
    "imagenet-train-tar": train_tar,
    "jpeg-shards": list_jpeg_shards,
}
