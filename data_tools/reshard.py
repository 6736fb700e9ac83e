"""`merge` and `reshard`: copy shard folders, in order, into one with other shard sizes.

Payloads are copied byte for byte without decoding. Every source shard is checked against its
SHA-256 first, and the result is verified at the end, unless it is in a store.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data_tools.inspection import say_problems
from data_tools.jobs import add_job_arguments, manifest_of, run_job, write_manifest
from data_tools.selection import (
    DEFAULT_SHARE,
    MEASURED,
    ImageSelection,
    check_made_for,
    open_selection,
)
from data_tools.shard_tasks import CROP_NUMBER, Encoded, ShardEncoder, UnitResult
from data_tools.sources import ImageSource, Refuse, SourceImage, SourcePart
from data_tools.stored_out import refuse_nested
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file, write_atomically
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME, SUFFIXES, Manifest, ShardEntry
from megavis.data.format.shards import ShardIndex, ShardReader, index_path

# Fields that all samples of a folder share.
_FIELDS = (
    "kind",
    "image_size",
    "num_tokens",
    "latent_shape",
    "frame_shape",
    "target",
    "flipped",
    "tokenizer",
)


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `merge` to its parser."""
    parser.add_argument("folders", type=Path, nargs="+", help="shard folders, in order")
    parser.set_defaults(selection=None)
    add_job_arguments(parser, shuffles=False, stores=True)


def add_reshard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reshard` to its parser."""
    parser.add_argument("folders", type=Path, nargs=1, metavar="folder", help="a shard folder")
    parser.add_argument(
        "--selection",
        type=Path,
        metavar="FOLDER",
        help="leave out images that `filter` dropped, of shards written with `--measure FOLDER`",
    )
    add_job_arguments(parser, shuffles=False, stores=True)


def run_reshard(arguments: argparse.Namespace) -> int:
    """Write the new folder and verify it; return 1 if writing failed or the new folder is damaged.

    Raises UserError if the folders do not match, or one is damaged or unfinished.
    """
    folders = [Folder(path.resolve(), Manifest.read(path)) for path in arguments.folders]
    for folder in folders:
        check_same_form(folders[0], folder)
        refuse_nested(folder.path, arguments.out, "a source")
    selection = open_selection("all", DEFAULT_SHARE, arguments.selection)
    check_made_for(selection, folders[0].manifest.source.sha256)
    source, encoder = MergedSource(tuple(folders), selection), CopyEncoder(tuple(folders))
    if failed := run_job(source, encoder, arguments, label="copying", finish=_finish):
        return failed
    if not isinstance(arguments.out, Path) or not (arguments.out / MANIFEST_NAME).exists():
        return 0  # in a store, or other slices are not finished
    return say_problems(arguments.out.resolve())


run_merge = run_reshard


@dataclass(frozen=True)
class Folder:
    """A finished shard folder and its manifest."""

    path: Path
    manifest: Manifest


def check_same_form(first: Folder, other: Folder) -> None:
    """Raise UserError if two folders cannot be merged.

    Decoder versions may differ, and labels may be missing; resize and crop must be equal.
    """
    one, two = first.manifest, other.manifest
    different = [name for name in _FIELDS if getattr(one, name) != getattr(two, name)]
    for name in ("resize", "crop"):
        if getattr(one.preparation, name) != getattr(two.preparation, name):
            different.append(name)
    if one.class_names and two.class_names and one.class_names != two.class_names:
        different.append("class_names (write one of them again with --classes-from)")
    if different:
        raise UserError(
            f"{first.path} and {other.path} cannot be merged: they differ in {different[0]}"
        )


@dataclass(frozen=True)
class Range:
    """Samples `[start, stop)` of a shard; the folder's `number` becomes part of their keys."""

    path: Path
    shard: ShardEntry
    start: int
    stop: int
    number: int | None


@dataclass(frozen=True)
class MergedPart:
    """Samples of one shard in the new folder."""

    ranges: tuple[Range, ...]
    selection: ImageSelection = ImageSelection()

    @property
    def num_files(self) -> int:
        """Number of samples."""
        return sum(part.stop - part.start for part in self.ranges)

    def pictures(self, refuse: Refuse, unread: Counter[str] | None = None) -> Iterator[SourceImage]:
        """Yield the samples. Raises UserError if a shard does not match its manifest."""
        for part in self.ranges:
            reader = _whole_shard(part.path, part.shard)
            index, content = reader.index, reader.open_map()
            dropped = _dropped(self.selection, reader.path.name, index)
            for place in range(part.start, part.stop):
                key = index.keys[place]
                image = CROP_NUMBER.sub("", key)
                if reason := dropped.get(index.sources[place]) or dropped.get(image):
                    refuse(index.sources[place], reason)
                    continue
                if part.number is not None:  # two folders may have the same keys
                    key = f"{part.number}-{key}"
                start = index.offsets[place]
                payload = content[start : start + index.lengths[place]].tobytes()
                yield SourceImage(key, index.sources[place], index.labels[place], payload)


def _dropped(selection: ImageSelection, shard: str, index: ShardIndex) -> dict[str, str]:
    """Return the reasons of the images of a shard that `filter` dropped, by name.

    Raises UserError if it did not measure them as this shard.
    """
    if selection.filtered is None:
        return {}
    number = int(shard.split("-")[1].split(".")[0])
    path = index_path(selection.filtered / MEASURED / shard)
    try:
        measured = ShardIndex.from_json(path.read_bytes(), path=path)
    except FileNotFoundError:
        measured = ShardIndex(shard, "")
    if unknown := set(index.sources) - set(measured.sources):
        raise UserError(
            f"--selection {selection.filtered} has no measurement of {min(unknown)} in {path.name}:"
            f" write the shards with --measure {selection.filtered}"
        )
    return selection.dropped(number)


@functools.lru_cache(maxsize=1)
def _whole_shard(path: Path, shard: ShardEntry) -> ShardReader:
    # Several units may read it in turn; it is hashed only once.
    if not path.is_file() or sha256_of_file(path) != shard.sha256:
        raise UserError(f"{path} is missing or does not have the SHA-256 of its manifest")
    return ShardReader(path)


@dataclass(frozen=True)
class MergedSource:
    """The concatenation of shard folders, without images that a selection drops."""

    folders: tuple[Folder, ...]
    selection: ImageSelection = ImageSelection()
    label_column: ClassVar[str] = ""

    @property
    def description(self) -> str:
        """Descriptions of the folders' sources."""
        sources = dict.fromkeys(folder.manifest.source.description for folder in self.folders)
        return self.selection.describe(" + ".join(sources))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Classes of the folders that have any."""
        return max((folder.manifest.class_names for folder in self.folders), key=len)

    @property
    def sha256(self) -> str:
        """Identity of all shards."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for shard in folder.manifest.shards:
                digest.update(f"{shard.sha256} {shard.index_sha256}\n".encode())
            digest.update(b"\n")
        digest.update(self.selection.filtered_sha256.encode())
        return digest.hexdigest()

    @property
    def root(self) -> Path:
        """The first folder."""
        return self.folders[0].path

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Divide the sequence of all samples without shuffling."""
        parts: list[SourcePart] = []
        open_ranges: list[Range] = []
        room = files_per_part
        for number, folder, shard in self._shards():
            start = 0
            while start < shard.num_samples:
                stop = min(start + room, shard.num_samples)
                open_ranges.append(Range(folder.path / shard.name, shard, start, stop, number))
                room -= stop - start
                start = stop
                if not room:
                    parts.append(MergedPart(tuple(open_ranges), self.selection))
                    open_ranges, room = [], files_per_part
        return parts + ([MergedPart(tuple(open_ranges), self.selection)] if open_ranges else [])

    def _shards(self) -> Iterator[tuple[int | None, Folder, ShardEntry]]:
        for number, folder in enumerate(self.folders):
            for shard in folder.manifest.shards:
                yield (number if len(self.folders) > 1 else None), folder, shard


@dataclass(frozen=True)
class CopyEncoder(ShardEncoder):
    """Copies payloads unchanged."""

    sources: tuple[Folder, ...]
    batch_size: int = 256

    @property
    def suffix(self) -> str:
        """Suffix of the kind of shards."""
        return SUFFIXES[self.sources[0].manifest.kind]

    def settings(self, folder: str) -> dict[str, Any]:
        """No settings: the source determines the bytes."""
        return {"copy": self.suffix}

    def prepare(self, directory: Path) -> None:
        """Copy the palette of palette shards."""
        palette = self.sources[0].path / PALETTE_NAME
        if palette.exists() and not (directory / PALETTE_NAME).exists():
            write_atomically(directory / PALETTE_NAME, palette.read_bytes())

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the payloads."""
        return [[[picture.content]] for picture in pictures]

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifests' common fields, with the versions of all decoders."""
        first = self.sources[0].manifest
        fields = {name: getattr(first, name) for name in _FIELDS}
        preparations = [source.manifest.preparation for source in self.sources]
        names = sorted({name for each in preparations for name in each.decoders})
        decoders = {
            name: " and ".join(dict.fromkeys(each.decoders.get(name, "") for each in preparations))
            for name in names
        }
        return {
            **fields,
            "preparation": first.preparation.model_copy(update={"decoders": decoders}),
        }


def _finish(
    source: ImageSource,
    encoder: ShardEncoder,
    results: Sequence[UnitResult],
    arguments: argparse.Namespace,
) -> None:
    """Write the manifest, with the combined counts of the sources."""
    assert isinstance(source, MergedSource)
    manifests = [folder.manifest for folder in source.folders]
    skipped: Counter[str] = Counter()
    for manifest in manifests:
        skipped.update(manifest.skipped)
    merged = manifest_of(source, encoder, results, number=0, seed=manifests[0].seed)
    skipped.update(merged.skipped)
    num_files = sum(manifest.source.num_files for manifest in manifests)
    record = merged.source.model_copy(update={"num_files": num_files})
    update = {"source": record, "skipped": dict(sorted(skipped.items()))}
    merged = merged.model_copy(update=update)
    name = arguments.url or None
    write_manifest(merged, arguments.out, workers=arguments.workers, name=name)
