"""Open a source from the command line, detecting its layout."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from data_tools.ground_truth import KAGGLE_TRUTH, find_truth, read_truth
from data_tools.imagenet import (
    VALIDATION_START,
    are_class_tars,
    flat_files,
    train_tar,
    validation,
)
from data_tools.job_report import say
from data_tools.labelled.data_set import OFFICIAL_SPLITS, TEST, VALIDATION
from data_tools.labelled.table import DATA_SETS
from data_tools.parquet import ParquetSource, list_parquet
from data_tools.parquet import notes as notes_on_parquet
from data_tools.selection import (
    DEFAULT_SHARE,
    SPLITS,
    ImageSelection,
    Split,
    check_made_for,
    open_selection,
)
from data_tools.sources import (
    FileSource,
    ImageSource,
    SourceFile,
    list_images,
    number_chosen,
)
from data_tools.tars import first_member, is_tar, list_tars, source_place
from data_tools.understood import (
    besides,
    failures_of_downloads,
    folders_in_tars,
    refuse_splits,
    summary,
)
from data_tools.user_text import read_names
from megavis.config.errors import UserError, counted
from megavis.data.format.folders import Contents, holds_manifest
from megavis.data.format.manifest import Manifest
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
    "parquet",
    "jpeg-shards",
    *DATA_SETS,
)
_IMAGENET_TARS = ("ILSVRC2012_img_train", "ILSVRC2012_img_val", "ILSVRC2012_img_test")
_URL_LISTS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".gz")
# Defaults for layouts that share a folder.
_PREFERRED = ("caltech-101",)


def add_source_arguments(parser: argparse.ArgumentParser, *, selects: bool = True) -> None:
    """Add the options that choose the source and its images."""
    parser.add_argument(
        "source",
        type=source_place,
        help="an image folder (the first folder on the path to a file is its class), "
        "ILSVRC2012_img_train.tar or the folder of its class tars, ILSVRC2012_img_val.tar or its "
        "folder, the root of Kaggle's ILSVRC (its training set), webdataset tars (a folder of "
        "them, one, or a pattern such as 'web/{00000..00123}.tar',"
        " also at s3://, gs:// or https://), Parquet files as the Hugging Face Hub stores them, a "
        "folder of jpeg shards, or "
        "a labelled data set as published: "
        f"{', '.join(DATA_SETS)}",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="layout of the source")
    parser.add_argument(
        "--ground-truth",
        type=Path,
        help="labels of ImageNet's flat validation set, if they are not next to it: "
        f"ILSVRC2012_devkit_t12 (folder or .tar.gz), Kaggle's {KAGGLE_TRUTH}, or a text file of "
        "class names",
    )
    add_classes_argument(parser)
    for content in ("image", "label"):
        parser.add_argument(
            f"--{content}-column",
            metavar="NAME",
            help=f"column of {content}s in Parquet files; default: the only one",
        )
    if selects:
        _add_selection_arguments(parser)
    else:
        parser.set_defaults(
            split="all", validation_share=DEFAULT_SHARE, selection=None, only_classes=None
        )


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
        "--validation-share",
        type=float,
        default=DEFAULT_SHARE,
        help="share of the images in --split validation; default: as in iGPT",
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
    """Open the source chosen by `add_source_arguments`, and report how it was interpreted.

    Raises UserError and OSError.
    """
    selection = open_selection(arguments.split, arguments.validation_share, arguments.selection)
    classes = read_class_names(arguments.classes_from)
    place: Path | str = arguments.source
    layout = arguments.layout
    if isinstance(place, str):
        if layout not in ("auto", "webdataset") or arguments.ground_truth:
            raise UserError(f"{place} is a URL, from which only webdataset tars are read")
        layout = "webdataset"
    elif layout == "auto":
        layout = "imagenet-validation" if arguments.ground_truth else find_layout(place)
        if layout == "folder":
            refuse_splits(place)
    only = read_names(arguments.only_classes) if arguments.only_classes else None
    _check_options(arguments, layout)
    source: ImageSource
    if layout == "parquet":
        assert isinstance(place, Path)
        source, labels_from = _open_parquet(arguments, place, selection, classes, only)
        notes = list(notes_on_parquet(source))
    elif layout == "webdataset":
        selection = replace(selection, split=_hash_split(layout, arguments.split))
        tars = list_tars(place, selection=selection, class_names=classes)
        check_made_for(selection, replace(tars, selection=ImageSelection()).sha256)
        notes = [*folders_in_tars(tars), *failures_of_downloads(tars)]
        source, labels_from = tars, ".cls members"
    else:
        assert isinstance(place, Path)
        selection = replace(selection, split=_hash_split(layout, arguments.split))
        files, labels_from = _open_files(arguments, layout, place, classes)
        check_made_for(selection, files.sha256)
        files = files if only is None else keep_classes(files, only)
        source, notes = selection.of_files(files), []
    if arguments.layout == "auto" and isinstance(place, Path):
        notes += besides(place, layout)
    by_suffix = layout in ("folder", "kaggle-train")
    for line in (summary(source, labels_from, by_suffix=by_suffix), *notes):
        say(line)
    return source


def _check_options(arguments: argparse.Namespace, layout: str) -> None:
    """Raise UserError if an option does not apply to the layout."""
    place = arguments.source
    if arguments.only_classes and arguments.classes_from:
        raise UserError(
            "--only-classes numbers the classes in order of their names: remove --classes-from"
        )
    if arguments.only_classes and layout == "webdataset":
        raise UserError(
            f"--only-classes: {place} was read as webdataset tars, whose classes are not known"
            " before they are read; set --layout if that is wrong"
        )
    for option in ("image_column", "label_column"):
        if layout != "parquet" and getattr(arguments, option):
            raise UserError(
                f"--{option.replace('_', '-')}: {place} was read as {layout}, which has no columns;"
                " remove the option, or set --layout if that is wrong"
            )


def _open_parquet(
    arguments: argparse.Namespace,
    place: Path,
    selection: ImageSelection,
    classes: Sequence[str] | None,
    only: Sequence[str] | None,
) -> tuple[ParquetSource, str]:
    """Open Parquet files; return them with the origin of their labels."""
    source = list_parquet(
        place,
        split=arguments.split,
        selection=selection,
        class_names=classes,
        only=only,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
    )
    # `filter` reads the images of all classes.
    columns = replace(source.columns, labels=())
    whole = replace(source, selection=ImageSelection(), columns=columns)
    check_made_for(selection, whole.sha256)
    if only is not None:
        total = counted(len(source.columns.labels), "class", "classes")
        say(f"{len(source.class_names)} of {total} are kept")
    return source, f"column {source.columns.label}"


def _open_files(
    arguments: argparse.Namespace, layout: str, place: Path, classes: Sequence[str] | None
) -> tuple[FileSource, str]:
    """Open a source other than web tars; return it with the origin of its labels."""
    if layout.startswith("kaggle"):
        place = _kaggle_folder(place, layout)
    if layout in ("imagenet-validation", "kaggle-validation"):
        return _validation(place, arguments.ground_truth, classes)
    if layout in DATA_SETS:
        data_set = DATA_SETS[layout]
        return data_set.open(place, arguments.split, class_names=classes), f"the files of {layout}"
    list_files, labels_from = _FILE_LAYOUTS[layout]
    return list_files(place, class_names=classes), labels_from


def keep_classes(source: FileSource, names: Sequence[str]) -> FileSource:
    """Return the images of some classes, numbered in order of their names.

    Prints how many of how many are kept. Raises UserError if the source lacks a class.
    """
    number = number_chosen(names, source.class_names, root=source.root)
    labels = {old: number.get(name) for old, name in enumerate(source.class_names)}
    kept = [
        replace(file, label=label)
        for file in source.files
        if (label := labels.get(file.label)) is not None
    ]
    say(
        f"{len(number)} of {counted(len(source.class_names), 'class', 'classes')},"
        f" {len(kept)} of {counted(len(source.files), 'file')} are kept"
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
    """Open a source whose labels do not matter; of a labelled data set, its test set."""
    layout = find_layout(place)
    if layout in DATA_SETS:
        return DATA_SETS[layout].open(place, TEST, class_names=None)
    if layout == "webdataset":
        return list_tars(place, selection=ImageSelection())
    if layout == "parquet":
        return list_parquet(place, held_out=True)
    if layout == "imagenet-validation":
        return flat_files(place)
    list_files, _ = _FILE_LAYOUTS[layout]
    return list_files(_kaggle_folder(place, layout))


def find_layout(place: Path) -> str:
    """Detect the layout of a path. Raises UserError if it has no known layout, and OSError."""
    if place.is_dir():
        return _folder_layout(place)
    if "{" in str(place) and not place.exists():
        return "parquet" if place.suffix == ".parquet" else "webdataset"
    if not place.is_file():
        raise UserError(f"{place} does not exist: give a folder of images, or a tar")
    if place.suffix == ".parquet":
        return "parquet"
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
    if holds_manifest(place):
        return "jpeg-shards"
    if (place / KAGGLE_TREE).is_dir():
        return "kaggle-train"
    found = [name for name, data_set in DATA_SETS.items() if data_set.lies_at(place)]
    if len(found) > 1 and found[0] not in _PREFERRED:
        raise UserError(f"{place} has labels for {' and '.join(found)}: choose one with --layout")
    if found:
        return found[0]
    contents = Contents.of(place)
    if contents.image_folders:
        _refuse_download_folders(place, contents)
        return "folder"
    # Check before tars: the tar of these images may lie among them.
    if any(map(_is_validation, contents.images)):
        return "imagenet-validation"
    if contents.tars:
        return _layout_of_tars(place, contents.tars)
    return "folder" if contents.images else _layout_without_images(place, contents)


def _layout_without_images(place: Path, contents: Contents) -> str:
    if contents.parquet_files:
        return "parquet"
    if any(name.endswith(".arrow") for name in contents.others):
        raise UserError(
            f"{place} holds Arrow files, as `save_to_disk` of the library `datasets` writes them:"
            f" make it a Parquet file, with datasets.load_from_disk({str(place)!r})"
            ".to_parquet('train.parquet')"
        )
    if all(name.endswith(_URL_LISTS) for name in contents.others):
        for name in contents.others:
            _refuse_url_list(place / name)
    return "folder"


def _layout_of_tars(place: Path, tars: Sequence[str]) -> str:
    if are_class_tars(tars):
        return "imagenet-train-tar"
    named = [name for name in tars if name.startswith(_IMAGENET_TARS)]
    if named:
        raise UserError(
            f"{place} holds {' and '.join(named)}, which are not web images: give one of them, such"
            f" as {place / named[0]}"
        )
    return "webdataset"


def _is_validation(name: str) -> bool:
    return name.split("/")[-1].startswith(VALIDATION_START)


def _refuse_download_folders(place: Path, contents: Contents) -> None:
    """Raise UserError if folders are parts of a download, which would be taken for classes."""
    parts = [name for name in contents.image_folders if f"{name}_stats.json" in contents.others]
    if parts:
        raise UserError(
            f"{place / parts[0]} is a part of a download, not a class, as {parts[0]}_stats.json"
            " beside it shows: run img2dataset with --output_format webdataset, or pass --layout"
            " folder if the folders are classes"
        )


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


def _validation(
    place: Path, truth: Path | None, classes: Sequence[str] | None
) -> tuple[FileSource, str]:
    if not place.exists():
        raise UserError(f"{place} does not exist: give ImageNet's validation tar or folder")
    truth = truth or find_truth(place)
    if truth is None:
        unlabelled = "folder" if place.is_dir() else "webdataset"
        raise UserError(
            f"{place} has ImageNet's validation images, whose labels are elsewhere: "
            f"give --ground-truth, or --layout {unlabelled} for no labels"
        )
    return validation(place, truth=read_truth(truth, classes), class_names=classes), str(truth)


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
    return read_names(place)


_FILE_LAYOUTS: Mapping[str, tuple[Callable[..., FileSource], str]] = {
    "folder": (list_images, "the names of folders"),
    "kaggle-train": (list_images, "the names of folders"),
    "imagenet-train-tar": (train_tar, "the names of class tars"),
    "jpeg-shards": (list_jpeg_shards, "the shards"),
}
"""What lists the files of a layout, and where their labels are from."""
