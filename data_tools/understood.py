"""Lines on how a source was interpreted, and on files in it that are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data_tools.parquet import ParquetSource
from data_tools.selection import FILTERED
from data_tools.sources import FileSource, ImageSource
from data_tools.tars import TarSource, first_member, stated_counts
from megavis.config.errors import UserError, counted
from megavis.data.format.folders import Contents, has_image_suffix, named_like_splits

_SHOWN = 3
_LABEL = ".cls"


def summary(source: ImageSource, labels_from: str, *, by_suffix: bool) -> str:
    """Return one line with the numbers of images and classes, and the origin of the labels.

    `by_suffix`: the files were not listed as images, so images are counted by their suffix.
    """
    parts = [f"{source.root}: {_size(source, by_suffix=by_suffix)}"]
    if not source.class_names:
        return f"{parts[0]}, no classes and no labels"
    names = ", ".join(source.class_names[:_SHOWN])
    more = ", ..." if len(source.class_names) > _SHOWN else ""
    parts.append(f"{counted(len(source.class_names), 'class', 'classes')} ({names}{more})")
    parts.append(f"labels from {labels_from}")
    if isinstance(source, FileSource):
        unlabelled = sum(
            file.label < 0 and not file.refused and (not by_suffix or has_image_suffix(file.name))
            for file in source.files
        )
        if unlabelled:
            parts.append(f"{counted(unlabelled, 'image')} without a label")
    return ", ".join(parts)


def _size(source: ImageSource, *, by_suffix: bool) -> str:
    if isinstance(source, TarSource):
        return counted(len(source.tars), "tar")
    if isinstance(source, ParquetSource):
        rows = counted(sum(rows for _, _, rows in source.files), "image")
        return f"{rows} in {counted(len(source.files), 'Parquet file')}"
    assert isinstance(source, FileSource)
    files = [file for file in source.files if not by_suffix or has_image_suffix(file.name)]
    images = sum(not file.refused for file in files)
    dropped = sum(file.refused.startswith(FILTERED) for file in source.files)
    others = len(source.files) - images - dropped
    text = counted(images, "image")
    if dropped:
        text += f", {counted(dropped, 'file')} that `filter` dropped"
    return text + (f" and {counted(others, 'other file')}" if others else "")


def besides(place: Path, layout: str) -> Iterator[str]:
    """Yield lines on files in a folder of a detected layout that are not read, and how to."""
    if not place.is_dir() or layout not in ("folder", "webdataset", "imagenet-validation"):
        return
    contents = Contents.of(place)
    yield from _unread_tars(place, contents, layout)
    tars = counted(len(contents.tars), "tar")
    the_tars = "the tar is" if len(contents.tars) == 1 else "the tars are"
    if layout == "webdataset" and contents.images:
        images = counted(len(contents.images), "image")
        read = "the tar" if len(contents.tars) == 1 else "the tars"
        yield (f"{place} holds {images} besides {read}, not read: for these give --layout folder")
    elif layout != "webdataset" and contents.tars:
        read = "the folders" if contents.image_folders else "the images"
        yield (
            f"{place} holds {tars} besides {read}: {the_tars} not read; for tars give --layout"
            " webdataset"
        )


def _unread_tars(place: Path, contents: Contents, layout: str) -> Iterator[str]:
    """Yield lines on compressed tars, and on tars in the folders of a folder of tars."""
    if contents.compressed_tars:
        tars = counted(len(contents.compressed_tars), "compressed tar")
        yield f"{place} holds {tars}, such as {contents.compressed_tars[0]}, not read: unpack first"
    if layout == "webdataset":
        for name in contents.other_folders:
            if inner := Contents.of(place / name).tars:
                yield (
                    f"{place / name} holds {counted(len(inner), 'tar')}, not read: only tars"
                    f" directly in {place} are; move them there, or give {place / name}"
                )


def folders_in_tars(source: TarSource) -> Iterator[str]:
    """Yield a line if images lie in folders inside the first tar, whose names may be classes."""
    if source.store is not None:  # a whole tar would be fetched for it
        return
    folder = first_member(source.tars[0][0]).removeprefix("./").rpartition("/")[0]
    if folder:
        yield (
            f"folders in a tar, such as {folder}, are not read as classes: if they are, unpack"
            f" {source.tars[0][0].name} and give the folder"
        )


def failures_of_downloads(source: TarSource) -> Iterator[str]:
    """Yield a line of img2dataset's counts, if it made the tars and the counts exist."""
    if source.store is not None:
        return
    counts = [stated_counts(path) for path, _ in source.tars]
    if not any(counts):
        return
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    failed = total["failed_to_download"], total["failed_to_resize"]
    yield (
        f"img2dataset: {counted(total['count'], 'URL')}, {counted(total['successes'], 'image')},"
        f" {failed[0]:,} failed to download, {failed[1]:,} to resize"
    )
    if lacking := sum(not each for each in counts):
        yield (
            f"{counted(lacking, 'tar')} without _stats.json, which img2dataset writes last: run it"
            " again to finish them"
        )


def refuse_splits(place: Path) -> None:
    """Raise UserError if the folders of images in `place` are named like splits of a data set."""
    names = Contents.of(place).image_folders
    if names and named_like_splits(names):
        first = next((name for name in names if name.lower().startswith("train")), names[0])
        raise UserError(
            f"{place} holds {', '.join(names)}, which look like splits and not like classes: give"
            f" one of them, such as {place / first}, or --layout folder if they are classes"
        )


def unread_lines(counts: Iterable[Mapping[str, int]], class_names: Sequence[str]) -> Iterator[str]:
    """Yield lines on unread members of tars, from their numbers by suffix in each tar."""
    total: dict[str, int] = {}
    for each in counts:
        for suffix, count in each.items():
            total[suffix] = total.get(suffix, 0) + count
    labels = total.pop(_LABEL, 0)
    if labels and not class_names:
        yield (
            f"{counted(labels, 'label')} ({_LABEL}) not read: give --classes-from, a shard folder"
            " or a text file with the names of the classes in their order"
        )
    if total:
        members = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(total.items()))
        yield f"not read in the tars: {members}"
