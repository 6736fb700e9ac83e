"""Units of work: plan them, find the finished ones, and run the others.

A unit converts one part of a source to one shard (in each folder that its encoder writes). Units
are independent, so any number of workers gives the same bytes, and a rerun after a crash repeats
only what is missing. A unit is finished once its index exists next to its tar.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_tools.decode import RefusedImageError
from data_tools.sources import ImageSource, SourceImage, SourcePart
from data_tools.stored_out import fetch_index, finished_shards, folder_of, has_tar, upload_shard
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import FORMAT_VERSION, ShardEntry
from megavis.data.format.shards import ShardIndex, ShardWriter, index_path, open_shard, write_index
from megavis.data.loading.stores import Store

# Result of an encoder for one image: for each of its folders, the payloads of the image's samples
# (one, or several crops) or the reason for rejecting the image there; or one reason for all.
Encoded = Sequence[Sequence[bytes] | RefusedImageError] | RefusedImageError

# The process that collects the results keeps only a part of the names of rejected files.
_MOST_NAMES = 100
_MOST_BYTES_AT_ONCE = 1 << 28
"""Undecoded files in memory, of which each may have a gigabyte."""
CROP_NUMBER = re.compile(r"-\d{1,5}$")
"""End of the keys of an image with several samples; numbers in keys of tars have more digits."""


class ShardEncoder(Protocol):
    """Encodes images as samples.

    It is picklable and small: large data (tables, weights) is loaded on the first call of `encode`
    and kept for the process's next units.
    """

    @property
    def suffix(self) -> str:
        """Suffix of the tar members."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The shard folders below `--out`; by default `--out` itself."""
        return ("",)

    @property
    def batch_size(self) -> int:
        """Images per call of `encode`; the last batch of a unit may be smaller."""
        return 16

    def suffix_in(self, folder: str) -> str:
        """Return the suffix of the tar members in `folder`."""
        return self.suffix

    def has_manifest(self, folder: str) -> bool:
        """Return whether `folder` is a data set, which its manifest finishes."""
        return True

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes of `folder`, as JSON values."""

    def prepare(self, directory: Path) -> None:
        """Write further files of a shard folder; by default none."""
        return

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Encode each image; the result depends only on the batch."""

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of `folder` that depend on its kind."""


def encode_each(
    pictures: list[SourceImage], samples: Callable[[SourceImage], Sequence[Sequence[bytes]]]
) -> list[Encoded]:
    """Encode images one by one with `samples`, which may raise RefusedImageError.

    Raises OSError with the name of the image if the memory is full.
    """
    encoded: list[Encoded] = []
    for picture in pictures:
        try:
            encoded.append(samples(picture))
        except RefusedImageError as refusal:
            encoded.append(refusal)
        except MemoryError:
            raise _memory_full(picture.name) from None
    return encoded


def _memory_full(name: str) -> OSError:
    """Return the machine's failure on a file, after which a rerun may succeed."""
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), name)


@dataclass(frozen=True)
class Unit:
    """The task of writing one shard, with the same file name in each of the shard folders.

    It is small enough to send to another process. `jobs` has the identity of the job for each
    folder, and `stores` the store to which its files are uploaded; None: they stay.
    """

    directories: tuple[Path, ...]
    shard: str
    part: SourcePart
    encoder: ShardEncoder
    jobs: tuple[str, ...]
    stores: tuple[Store | None, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The tars to write."""
        return tuple(directory / self.shard for directory in self.directories)


@dataclass(frozen=True)
class UnitResult:
    """Result of a unit.

    Attributes:
        num_files: number of source files that it read.
        shards: one entry per folder; None if every file was rejected.
        skipped: number of rejected files by reason.
        names: names of these, at most 100 for each reason; all are in the shard's JSON index.
        was_there: whether it had been finished before.
        peak_memory: peak memory so far of the process that ran it, in bytes.
        unread: number of members of its tar that were not read, by suffix.
        unlabelled: number of samples without a label, in one folder.
    """

    num_files: int
    shards: tuple[ShardEntry | None, ...]
    skipped: Mapping[str, int]
    names: Mapping[str, Sequence[str]]
    was_there: bool
    peak_memory: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)
    unlabelled: int = 0


def plan_units(
    source: ImageSource,
    encoder: ShardEncoder,
    *,
    out: Path,
    url: str = "",
    files_per_shard: int,
    seed: int,
) -> list[Unit]:
    """Return the units that write `source` to the shard folders of `encoder` below `out`.

    With a `url`, these are temporary, and the shards go to folders of the same names below it.
    """
    settings = {
        "format": FORMAT_VERSION,
        "files_per_shard": files_per_shard,
        "seed": seed,
        "source": source.sha256,
        "classes": source.class_names,
    }
    if source.label_column:
        settings["labels"] = source.label_column
    jobs = tuple(
        hashlib.sha256(
            json.dumps({**settings, "recipe": encoder.settings(folder)}, sort_keys=True).encode()
        ).hexdigest()
        for folder in encoder.folders
    )
    directories = tuple(out / folder for folder in encoder.folders)
    stores = tuple(folder_of(url, folder) for folder in encoder.folders)
    return [
        Unit(directories, f"shard-{number:06d}.tar", part, encoder, jobs, stores)
        for number, part in enumerate(source.parts(files_per_part=files_per_shard, seed=seed))
    ]


def do_unit(unit: Unit, advance: Callable[[int], None] | None = None) -> UnitResult:
    """Write the missing shards of a unit; call `advance` with numbers of processed files.

    Raises UserError if a folder has shards of another job, and OSError.
    """
    targets = list(zip(unit.paths, unit.stores, unit.jobs, strict=True))
    indexes = [finished_index(path, store, job=job) for path, store, job in targets]
    present = [index for index in indexes if index is not None]
    if len(present) == len(unit.paths):
        return _result(unit, present, was_there=True)
    unread: Counter[str] = Counter()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(open_shard(path, job=job, suffix=unit.encoder.suffix_in(folder)))
            for path, job, folder in zip(unit.paths, unit.jobs, unit.encoder.folders, strict=True)
        ]
        try:
            _fill(unit, writers, unread, advance)
        except MemoryError:
            raise _memory_full(unit.shard) from None
    made = [writer.index for writer in writers]
    for path, index in zip(unit.paths, made, strict=True):
        index.unread = dict(sorted(unread.items()))
        if not len(index):
            path.unlink()
        write_index(path, index)
    for path, store, _ in targets:
        if store is not None:
            upload_shard(store, path)
    return _result(unit, made, was_there=False)


def refuse_other_jobs(units: Sequence[Unit]) -> None:
    """Raise UserError if a folder has shards of another job, by one finished shard in each.

    A unit checks only its own shard, so others would be written before it is rejected.
    """
    for unit in units[:1]:  # all have the same folders and jobs
        for path, store, job in zip(unit.paths, unit.stores, unit.jobs, strict=True):
            for index in finished_shards(path.parent, store):
                if _index_of(index, store, job=job) is not None:
                    break


def finished_index(path: Path, store: Store | None, *, job: str) -> ShardIndex | None:
    """Return the index of an intact tar, or None if it must be written (again).

    In a store only the size of the tar is compared: the store has checked the bytes on arrival.

    Raises UserError if it was written by another job, and OSError if a store does not answer.
    """
    if store is not None:
        fetch_index(store, path)
    index = _index_of(index_path(path), store, job=job)
    if index is None:
        return None
    if not len(index):  # every file was rejected, so there is no tar
        return index
    if store is not None:
        return index if has_tar(store, path.name, index.num_bytes) else None
    whole = path.is_file() and sha256_of_file(path) == index.sha256
    return index if whole else None


def _index_of(path: Path, store: Store | None, *, job: str) -> ShardIndex | None:
    """Read an index; None if it is missing or damaged. Raises UserError if of another job."""
    try:
        index = ShardIndex.from_json(path.read_bytes(), path=path)
    except (FileNotFoundError, UserError):
        return None
    if index.job != job:
        where = store.url if store else path.parent
        raise UserError(
            f"{where} holds shards made from other images or settings: choose another --out, or"
            " delete it"
        )
    return index


def _fill(
    unit: Unit,
    writers: list[ShardWriter],
    unread: Counter[str],
    advance: Callable[[int], None] | None,
) -> None:
    def refuse(name: str, reason: str) -> None:
        for writer in writers:
            writer.index.skipped.append([name, reason])

    pictures = unit.part.pictures(refuse, unread)
    for batch in _batches(pictures, unit.encoder.batch_size):
        for picture, encoded in zip(batch, unit.encoder.encode(batch), strict=True):
            if isinstance(encoded, RefusedImageError):
                refuse(picture.name, str(encoded))
                continue
            for writer, payloads in zip(writers, encoded, strict=True):
                if isinstance(payloads, RefusedImageError):
                    writer.index.skipped.append([picture.name, str(payloads)])
                else:
                    _add(writer, picture, payloads)
        if advance is not None:
            advance(len(batch))


def _add(writer: ShardWriter, picture: SourceImage, payloads: Sequence[bytes]) -> None:
    for number, payload in enumerate(payloads):
        key = picture.key if len(payloads) == 1 else f"{picture.key}-{number}"
        writer.add(key, payload, label=picture.label, source=picture.name)


def _batches(pictures: Iterator[SourceImage], size: int) -> Iterator[list[SourceImage]]:
    """Yield `size` images at a time; fewer if their files are large."""
    batch: list[SourceImage] = []
    num_bytes = 0
    for picture in pictures:
        batch.append(picture)
        num_bytes += len(picture.content)
        if len(batch) == size or num_bytes >= _MOST_BYTES_AT_ONCE:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _result(unit: Unit, indexes: list[ShardIndex], *, was_there: bool) -> UnitResult:
    first = indexes[0]
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in first.skipped:
        if len(names[reason]) < _MOST_NAMES:
            names[reason].append(name)
    return UnitResult(
        num_files=_num_pictures(first) + len(first.skipped),
        shards=tuple(map(_entry, unit.paths, indexes)),
        skipped=dict(Counter(reason for _, reason in first.skipped)),
        names=dict(names),
        was_there=was_there,
        peak_memory=peak_memory(),
        unread=first.unread,
        unlabelled=sum(label < 0 for label in first.labels),
    )


def _num_pictures(index: ShardIndex) -> int:
    """Return the number of images in a shard; in a tar several may have one name."""
    return len({CROP_NUMBER.sub("", key) for key in index.keys})


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; 0 if Linux does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    # Not getrusage: its maximum survives exec, so a child of a large parent would seem large.
    kibibytes = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kibibytes[1]) << 10 if kibibytes else 0


def _entry(path: Path, index: ShardIndex) -> ShardEntry | None:
    if not len(index):
        return None
    return ShardEntry(
        name=index.shard,
        num_samples=len(index),
        num_bytes=index.num_bytes,
        sha256=index.sha256,
        index_sha256=sha256_of_file(index_path(path)),
    )
