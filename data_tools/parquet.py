"""Read images from Parquet files, the form in which the Hugging Face Hub stores data sets.

A file is one part of a source and becomes one shard, as a webdataset tar does: one row cannot be
read without its whole row group, so the rows are read in order.

In the Hub's convention a column of images is a struct of `bytes` and `path`, the metadata of the
schema (`huggingface`) contains the names of the classes, and a file is named after its split and
number: `train-00000-of-00294.parquet`. Plain columns of bytes, as img2dataset writes them, are
read too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from data_tools.labelled.data_set import EXTRA, OFFICIAL_SPLITS, TEST, TRAIN, UNLABELED, VALIDATION
from data_tools.selection import ImageSelection, Split
from data_tools.sources import (
    MAX_FILE_BYTES,
    TOO_LARGE,
    UNREADABLE,
    WRONG_LABEL,
    Refuse,
    SourceImage,
    SourcePart,
    errors_named,
    is_of_one_file,
    number_chosen,
    number_classes,
    printable,
    size_and_fault,
)
from data_tools.tars import expanded
from megavis.config.errors import UserError, counted
from megavis.data.format.folders import Contents

DAMAGED = "damaged rows of a Parquet file"
NO_IMAGE = "no bytes of an image in its row"
_ROWS_AT_ONCE = 32
_METADATA = b"huggingface"
_SPLIT_NAMES = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
    EXTRA: ("extra",),
    UNLABELED: ("unlabeled", "unlabelled", "unsupervised"),
}
_NUMBERED = re.compile(r"(.*)-\d{5}-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Columns:
    """The columns that are read.

    Attributes:
        image: the column of images.
        label: the column of labels; empty if none is read.
        labels: the label of each number in that column; None if such images are not selected.
    """

    image: str
    label: str = ""
    labels: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class ParquetPart:
    """One file.

    Attributes:
        path: its path.
        number: index among the files of the source.
        num_files: number of its images; 0 if only some of them are selected.
        columns: what is read.
        selection: images to select.
    """

    path: Path
    number: int
    num_files: int
    columns: Columns
    selection: ImageSelection

    def pictures(self, refuse: Refuse, unread: Counter[str] | None = None) -> Iterator[SourceImage]:
        """Yield the images of the file in order.

        Raises OSError if its disk has failed: that is no damage, and a rerun reads it again.
        """
        del unread
        dropped = self.selection.dropped(self.number)
        for row, label, path, content in self._rows(refuse):
            name = f"{self.path.name}/{row if path is None else printable(path)}"
            number = self._number(label)
            if number is None or not self.selection.has(name):
                continue
            key = f"{self.number:06d}-{row:06d}"
            reason = dropped.get(name) or dropped.get(key) or _refusal(content, number)
            if reason:
                refuse(name, reason)
            else:
                yield SourceImage(key, name, number, content)

    def _number(self, label: int | None) -> int | None:
        """Return the label of an image; None if it is not selected, -2 if there is no such one."""
        if label is None or label == -1 or not self.columns.label:
            # Where some classes are selected, an image without one is not.
            return None if None in self.columns.labels else -1
        return self.columns.labels[label] if 0 <= label < len(self.columns.labels) else -2

    def _rows(self, refuse: Refuse) -> Iterator[tuple[int, int | None, str | None, Any]]:
        """Yield number, label, path and bytes of each row."""
        from pyarrow import parquet

        try:
            # Opened here, so that errors of the disk differ from damage.
            with errors_named(self.path), self.path.open("rb") as file:
                opened = parquet.ParquetFile(file, page_checksum_verification=True)
                row = 0
                for group in range(opened.num_row_groups):
                    count = opened.metadata.row_group(group).num_rows
                    try:
                        yield from self._group(opened, group, row)
                    except Exception as error:
                        if not is_damage(error):
                            raise
                        refuse(f"{self.path.name}/{row}-{row + count - 1}", DAMAGED)
                    row += count
        except OSError as error:
            if not is_of_one_file(error, self.path.parent):
                raise
            refuse(self.path.name, UNREADABLE)

    def _group(
        self, opened: Any, group: int, row: int
    ) -> Iterator[tuple[int, int | None, str | None, Any]]:
        """Yield the rows of a row group, the first of which has number `row`."""
        image, label = self.columns.image, self.columns.label
        batches = opened.iter_batches(
            _ROWS_AT_ONCE,
            row_groups=[group],
            columns=[image, label] if label else [image],
            use_threads=False,
        )
        for batch in batches:
            images = batch.column(image).to_pylist()
            labels = batch.column(label).to_pylist() if label else [None] * len(images)
            for number, each in zip(labels, images, strict=True):
                if isinstance(each, dict):
                    yield row, number, each.get("path"), each.get("bytes")
                else:
                    yield row, number, None, each
                row += 1


def is_damage(error: Exception) -> bool:
    """Return whether pyarrow says by an error that a file is damaged, not that it was not read."""
    import pyarrow

    # It raises OSError for damage too, without a number.
    if isinstance(error, OSError):
        return error.errno is None
    return isinstance(error, pyarrow.ArrowException)


def _refusal(content: bytes | None, label: int) -> str:
    """Return why an image is rejected; empty if it is not."""
    if not content:
        return NO_IMAGE
    if len(content) > MAX_FILE_BYTES:
        return TOO_LARGE
    return WRONG_LABEL if label < -1 else ""


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files in order of their names, and a selection of their images.

    Attributes:
        description: one line for the manifest.
        root: the folder, file or pattern.
        files: path, size in bytes and number of rows of each file.
        columns: what is read.
        class_names: names of the classes, indexed by label.
        selection: the images that are read.
        unread: names of the other columns.
        other_files: numbers of files that are not read, by their split.
    """

    description: str
    root: Path
    files: tuple[tuple[Path, int, int], ...]
    columns: Columns
    class_names: tuple[str, ...]
    selection: ImageSelection
    unread: tuple[str, ...]
    other_files: Mapping[str, int]

    @property
    def label_column(self) -> str:
        """The column of labels."""
        return self.columns.label

    @property
    def sha256(self) -> str:
        """Identity of the files, by name and size, and of the images that are read of them.

        Labels belong to it only where they choose the images.
        """
        columns = self.columns if None in self.columns.labels else Columns(self.columns.image)
        digest = hashlib.sha256(f"{self.selection.identity} {columns}\n".encode())
        for path, num_bytes, _ in self.files:
            digest.update(f"{path.name}\0{num_bytes}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Return one part per file, regardless of the arguments."""
        is_whole = (
            self.selection.identity == ImageSelection().identity and None not in self.columns.labels
        )
        return [
            ParquetPart(path, number, rows * is_whole, self.columns, self.selection)
            for number, (path, _, rows) in enumerate(self.files)
        ]


def list_parquet(
    place: Path,
    *,
    split: str = "all",
    held_out: bool = False,
    selection: ImageSelection | None = None,
    class_names: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ParquetSource:
    """List the Parquet files of a folder or a pattern, or one file.

    Args:
        split: `all`, one after which files are named, or one to make by a hash of the names.
        held_out: ignore `split` where files of several splits are present, and read those of
            the test split, or without one those of the validation split.
        class_names: the numbering of another data set's classes.
        only: names of the classes to keep, which are numbered in order of their names.
        image_column: by default the only one with bytes.
        label_column: by default the only one whose classes the file names.

    Raises:
        UserError: there is no such file, one is damaged or without images, or a choice is left.
        OSError: a file cannot be opened.
    """
    found: dict[str, list[Path]] = {}
    for path in _files(place):
        found.setdefault(_split_of(path.name), []).append(path)
    if held_out and len(found.keys() - {""}) > 1:
        split = next((name for name in (TEST, VALIDATION) if name in found), split)
    official, hashed = _of_split(found, split, place)
    paths = found.pop(official)
    selection = replace(selection or ImageSelection(), split=hashed)
    footers = [_footer(path) for path in paths]
    schema, _ = footers[0]
    image = _image_column(schema, image_column, paths[0])
    label, names = _label_column(schema, label_column, paths[0], known=class_names)
    for path, (each, _) in zip(paths, footers, strict=True):
        _check_alike(each, Columns(image, label), names, what=f"{path} and {paths[0].name}")
    if only is None:
        number = number_classes(names, class_names, root=place)
    else:
        number = number_chosen(only, names, root=place)
    description = f"{counted(len(paths), 'Parquet file')} of {printable(place.name)}"
    return ParquetSource(
        selection.describe(description),
        place,
        tuple(
            (path, path.stat().st_size, rows)
            for path, (_, rows) in zip(paths, footers, strict=True)
        ),
        Columns(image, label, tuple(number.get(name) for name in names)),
        tuple(number) if label else (),
        selection,
        tuple(name for name in schema.names if name not in (image, label)),
        {name or "no split": len(files) for name, files in found.items()},
    )


def _check_alike(schema: Any, columns: Columns, names: Sequence[str], *, what: str) -> None:
    """Raise UserError if a file lacks a column of the first, or names its classes otherwise."""
    for column in (columns.image, columns.label):
        if column and column not in schema.names:
            raise UserError(f"{what} differ: only the second has a column {column!r}")
    if _class_names(schema).get(columns.label, names) != names:
        raise UserError(f"{what} differ in the names of the classes of {columns.label!r}")


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        paths = [place / name for name in Contents.of(place).parquet_files]
    else:
        paths = [Path(name) for name in expanded(str(place))]
    if not paths:
        raise UserError(f"{place} holds no Parquet file")
    for path in paths:
        fault = size_and_fault(path)[1] if path.exists() else "it does not exist"
        if fault:
            raise UserError(f"{path} cannot be read: {fault}")
    return sorted(paths, key=lambda path: path.name)


def _of_split(found: Mapping[str, Sequence[Path]], split: str, place: Path) -> tuple[str, Split]:
    """Return the split whose files are read, and the split to make of them by a hash of names.

    `found` has the files of each split, those named after none under an empty name.
    """
    named = [name for name in _SPLIT_NAMES if name in found]
    if split in get_args(Split):
        usual = [name for name in named if name not in OFFICIAL_SPLITS] or named
        if split in usual and len(usual) > 1:
            return split, "all"
        if split == "all" and len(usual) > 1:
            raise UserError(
                f"{place} has files of {' and '.join(usual)}: choose with --split, such as --split"
                f" {usual[0]}"
            )
        if split == "all" or usual in ([], [TRAIN]):
            return (usual or [""])[0], cast(Split, split)
    if split in found:
        return split, "all"
    have = f"has files of {' and '.join(named)} only" if named else "does not name its files so"
    raise UserError(f"--split {split}: {place} {have}")


def _split_of(name: str) -> str:
    """Return the split after which a file is named; empty if it is after none."""
    first = re.split(r"[^a-z]", name.lower())[0]
    return next((split for split, names in _SPLIT_NAMES.items() if first in names), "")


def _footer(path: Path) -> tuple[Any, int]:
    """Return schema and number of rows of a file. Raises UserError, and OSError."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} needs pyarrow: pip install 'megavis[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    except Exception as error:
        if not is_damage(error):
            raise
        raise UserError(
            f"{path} is not a whole Parquet file: its end, which lists the rows, is missing or"
            " damaged; download it again"
        ) from None


def _image_column(schema: Any, wanted: str | None, path: Path) -> str:
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0 and holds_bytes(kind.field("bytes").type)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    found = [field.name for field in schema if holds_bytes(field.type)]
    if wanted is not None:
        if wanted in found:
            return wanted
        raise UserError(
            f"--image-column {wanted}: {path} has no such column of bytes; it has"
            f" {', '.join(found) or 'none'}"
        )
    if not found:
        raise UserError(
            f"{path} has no column of images, only {', '.join(schema.names)}; if it lists URLs,"
            f" download them with `img2dataset --url_list {path} --input_format parquet --url_col"
            " url --output_format webdataset --resize_mode no --output_folder web`, then give the"
            " folder web"
        )
    if len(found) > 1:
        raise UserError(
            f"{path} has bytes in {' and '.join(found)}: choose the images with --image-column,"
            f" such as --image-column {found[0]}"
        )
    return found[0]


def _label_column(
    schema: Any, wanted: str | None, path: Path, *, known: Sequence[str] | None
) -> tuple[str, tuple[str, ...]]:
    """Return the column of labels, and the names of its classes; empty if there is none."""
    from pyarrow import types

    named = _class_names(schema)
    whole = [field.name for field in schema if types.is_integer(field.type)]
    if wanted is None:
        if len(named) > 1:
            raise UserError(
                f"{path} has classes in {' and '.join(named)}: choose one with --label-column,"
                f" such as --label-column {next(iter(named))}"
            )
        # Numbers without names are only labels if their classes are given.
        guessed = "label" if known is not None and "label" in schema.names and not named else ""
        if guessed and guessed not in whole:
            raise UserError(
                f"--classes-from: the values of column {guessed} of {path} are"
                f" {schema.field(guessed).type}, not whole numbers: replace them by the numbers of"
                " the classes, from 0, or remove the option to read no labels"
            )
        wanted = next(iter(named), guessed)
    elif wanted not in whole:
        raise UserError(
            f"--label-column {wanted}: {path} has no such column of whole numbers; it has"
            f" {', '.join(whole) or 'none'}"
        )
    if not wanted or wanted in named:
        return wanted, named.get(wanted, ())
    if known is None:
        raise UserError(
            f"--label-column {wanted}: {path} does not name its classes: give --classes-from, a"
            " shard folder or a text file with their names in order"
        )
    return wanted, tuple(known)


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the classes that the Hub's metadata name, by column."""
    try:
        features = json.loads((schema.metadata or {})[_METADATA])["info"]["features"]
        return {
            column: tuple(map(str, feature["names"]))
            for column, feature in features.items()
            if isinstance(feature, Mapping)
            and feature.get("_type") == "ClassLabel"
            and column in schema.names
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def notes(source: ParquetSource) -> Iterator[str]:
    """Yield lines on what is not read: a held-out part, files and columns."""
    if source.selection.split != "all":
        yield (
            f"--split {source.selection.split} is made by a hash of the names, which hold out"
            f" {source.selection.share:.0%}: no file is named validation; --split all reads all"
        )
    for name, count in source.other_files.items():
        yield f"{counted(count, 'file')} of {name} not read"
    present = Counter(
        (match[1], int(match[2]))
        for path, *_ in source.files
        if (match := _NUMBERED.fullmatch(path.name))
    )
    for (name, total), count in present.items():
        if count < total:
            yield f"{count} of the {total} files {name}-…-of-{total:05d}.parquet are there"
    if source.unread:
        yield f"columns not read: {', '.join(source.unread)}"
