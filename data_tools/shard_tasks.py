"""Units of work: plan them, find those that are done, and run them.

A unit turns one part of a source into one shard (in each folder that its encoder writes). Units do
not depend on each other, so any number of workers gives the same bytes, and a rerun after a crash
redoes only what is missing. A unit is finished once its index exists next to its tar.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_tools.decode import RefusedImageError
from data_tools.sources import ImageSource, SourceImage, SourcePart
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import FORMAT_VERSION, ShardEntry
from megavis.data.format.shards import ShardIndex, ShardWriter, index_path, open_shard, write_index

# What an encoder returns for one image: for each of its folders the payloads of the samples that
# this picture gives there (one, or several crops), or the reason why it gives none.
Encoded = Sequence[Sequence[bytes]] | RefusedImageError


class ShardEncoder(Protocol):
    """Encodes images as samples of a verb's shards.

    It can be pickled and is small: what is large (tables, weights) is loaded where `encode` first
    needs it, and kept for the next unit of the process.

    Attributes:
        folders: the shard folders, below `--out`; "" is `--out` itself.
        suffix: of the members of the tars.
        batch_size: how many pictures `encode` gets at once (the last batch of a unit has fewer).
    """

    @property
    def folders(self) -> tuple[str, ...]: ...  # noqa: D102 - see above
    @property
    def suffix(self) -> str: ...  # noqa: D102 - see above
    @property
    def batch_size(self) -> int: ...  # noqa: D102 - see above

    def settings(self, folder: str) -> dict[str, Any]:
        """Return all that decides about the bytes of `folder`, as JSON values."""

    def prepare(self, directory: Path) -> None:
        """Write what a shard folder holds besides shards. Raises UserError where it cannot be."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return what each picture gives; a function of the batch alone."""

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the fields of the manifest of `folder` that belong to its kind."""


@dataclass(frozen=True)
class Unit:
    """The work of one shard; small enough to send to another process.

    Attributes:
        directories: the shard folders.
        shard: file name of the tar, the same in each of them.
        part: what it reads.
        encoder: encodes it.
        jobs: identity of the whole job, one a folder.
    """

    directories: tuple[Path, ...]
    shard: str
    part: SourcePart
    encoder: ShardEncoder
    jobs: tuple[str, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The tars to write."""
        return tuple(directory / self.shard for directory in self.directories)


@dataclass(frozen=True)
class UnitResult:
    """What became of a unit.

    Attributes:
        num_files: files of the source that it read.
        shards: one entry a folder, None where every file was refused.
        skipped: `(name, reason)` of each file that gave no sample.
        was_there: it was finished before.
        peak_memory: bytes, the most that the process which did it has held so far.
    """

    num_files: int
    shards: tuple[ShardEntry | None, ...]
    skipped: tuple[tuple[str, str], ...]
    was_there: bool
    peak_memory: int = 0


def plan_units(
    source: ImageSource, encoder: ShardEncoder, *, out: Path, files_per_shard: int, seed: int
) -> list[Unit]:
    """Return the units that turn `source` into the shard folders of `encoder` below `out`."""
    settings = {
        "format": FORMAT_VERSION,
        "files_per_shard": files_per_shard,
        "seed": seed,
        "source": source.sha256,
        "classes": source.class_names,
    }
    jobs = tuple(
        hashlib.sha256(
            json.dumps({**settings, "recipe": encoder.settings(folder)}, sort_keys=True).encode()
        ).hexdigest()
        for folder in encoder.folders
    )
    directories = tuple(out / folder for folder in encoder.folders)
    return [
        Unit(directories, f"shard-{number:06d}.tar", part, encoder, jobs)
        for number, part in enumerate(source.parts(files_per_part=files_per_shard, seed=seed))
    ]


def do_unit(unit: Unit, advance: Callable[[int], None] | None = None) -> UnitResult:
    """Write what is missing of a unit; call `advance` with each number of files done.

    Raises:
        UserError: a folder holds shards of another job.
        OSError: the disk fails.
    """
    indexes = [
        finished_index(path, job=job) for path, job in zip(unit.paths, unit.jobs, strict=True)
    ]
    present = [index for index in indexes if index is not None]
    if len(present) == len(unit.paths):
        return _result(unit, present, was_there=True)
    skipped: list[tuple[str, str]] = []
    with ExitStack() as stack:
        writers = [
            stack.enter_context(open_shard(path, job=job, suffix=unit.encoder.suffix))
            for path, job in zip(unit.paths, unit.jobs, strict=True)
        ]
        _fill(unit, writers, skipped, advance)
    made = [writer.index for writer in writers]
    for path, index in zip(unit.paths, made, strict=True):
        index.skipped = [list(entry) for entry in skipped]
        if not len(index):
            path.unlink()
        write_index(path, index)
    return _result(unit, made, was_there=False)


def finished_index(path: Path, *, job: str) -> ShardIndex | None:
    """Return the index of a tar whose bytes are whole, None where it must be made (again).

    Raises:
        UserError: it is the work of another job, which must not be overwritten.
    """
    beside = index_path(path)
    try:
        index = ShardIndex.from_json(beside.read_bytes(), path=beside)
    except (FileNotFoundError, UserError):
        return None
    if index.job != job:
        raise UserError(
            f"{path.parent} holds shards made from other images or settings: "
            "choose another --out, or delete it"
        )
    if not len(index):  # every file was refused: there is no tar
        return index
    whole = path.is_file() and sha256_of_file(path) == index.sha256
    return index if whole else None


def _fill(
    unit: Unit,
    writers: list[ShardWriter],
    skipped: list[tuple[str, str]],
    advance: Callable[[int], None] | None,
) -> None:
    def refuse(name: str, reason: str) -> None:
        skipped.append((name, reason))

    pictures = unit.part.pictures(refuse)
    for batch in _batches(pictures, unit.encoder.batch_size):
        for picture, encoded in zip(batch, unit.encoder.encode(batch), strict=True):
            if isinstance(encoded, RefusedImageError):
                refuse(picture.name, str(encoded))
                continue
            for writer, payloads in zip(writers, encoded, strict=True):
                _add(writer, picture, payloads)
        if advance is not None:
            advance(len(batch))


def _add(writer: ShardWriter, picture: SourceImage, payloads: Sequence[bytes]) -> None:
    for number, payload in enumerate(payloads):
        key = picture.key if len(payloads) == 1 else f"{picture.key}-{number}"
        writer.add(key, payload, label=picture.label, source=picture.name)


def _batches(pictures: Iterator[SourceImage], size: int) -> Iterator[list[SourceImage]]:
    while batch := list(itertools.islice(pictures, size)):
        yield batch


def _result(unit: Unit, indexes: list[ShardIndex], *, was_there: bool) -> UnitResult:
    first = indexes[0]
    skipped = tuple((name, reason) for name, reason in first.skipped)
    return UnitResult(
        num_files=len(set(first.sources)) + len(skipped),
        shards=tuple(map(_entry, unit.paths, indexes)),
        skipped=skipped,
        was_there=was_there,
        peak_memory=peak_memory(),
    )


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held, 0 where Linux does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    # Not getrusage: its maximum outlives the exec that starts a process, so that a child of a
    # large parent seems large.
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
