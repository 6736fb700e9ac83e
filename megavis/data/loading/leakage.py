"""Find evaluation images among the training images, and which shards a run was trained on.

Compares the manifests (SHA-256 of shards, of lists of source files) and, if that is not too much to
read, the samples' bytes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader
from megavis.data.loading.remote import RemoteFolder, is_remote

READ_AT_MOST = 1 << 28
"""Bytes of a folder whose samples are compared; of larger ones the manifests alone are."""
TOLERATED = 0.01
"""Share of equal samples that is no mistake: published test sets have some, and crops of one flat
colour are equal wherever they come from."""


class Shards(Protocol):
    """A shard folder: `ShardDataset`, or what `find_shards` gives.

    Attributes:
        directory: its path.
        manifest: what its samples are.
    """

    @property
    def directory(self) -> Path: ...  # noqa: D102 - see above
    @property
    def manifest(self) -> Manifest: ...  # noqa: D102 - see above


@dataclass(frozen=True)
class FoundShards:
    """A shard folder of which the manifest alone was read."""

    directory: Path
    manifest: Manifest


def find_shards(path: str, *, cache: str | None = None) -> FoundShards:
    """Read the manifest of a shard folder or URL; raises UserError as `Manifest.read`."""
    directory = RemoteFolder.open(path, cache).directory if is_remote(path) else Path(path)
    return FoundShards(directory, Manifest.read(directory))


def refuse_overlap(judging: Shards, trained_on: Iterable[Shards]) -> int | None:
    """Refuse images that judge if they were trained on.

    Args:
        judging: a test or validation set.
        trained_on: what weights or classifiers were fitted on; one folder may occur twice.

    Returns:
        How many samples of `judging` are in the others too, at most 1 % of them in each; None
        where the samples of some could not be compared.

    Raises:
        UserError: they overlap; names both folders.
    """
    # By directory: most runs are probed on what they were trained on.
    folders = {folder.directory.resolve(): folder for folder in trained_on}
    counts = [_compare(judging, folder) for folder in folders.values()]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _compare(judging: Shards, folder: Shards) -> int | None:
    """Return how many samples are equal; None where that is not known."""
    reason = overlap_of_manifests(judging.manifest, folder.manifest)
    equal = None
    if reason is None and _are_comparable(judging, folder):
        # Each once: seconds of silence are equal to each other, wherever they come from.
        equal = len(set(_digests(folder)).intersection(_digests(judging)))
        num_samples = judging.manifest.num_samples
        if equal > TOLERATED * num_samples:
            reason = f"{equal} of its {num_samples} samples are there too"
    if reason is not None:
        raise UserError(
            f"{judging.directory} cannot judge what was trained on {folder.directory}: {reason}"
        )
    return equal


def overlap_of_manifests(one: Manifest, other: Manifest) -> str | None:
    """Return why two manifests speak of the same images, as a clause; None where they do not."""
    names = {shard.sha256: shard.name for shard in other.shards}
    for shard in one.shards:
        if shard.sha256 in names:
            return f"its {shard.name} is the {names[shard.sha256]} there, by SHA-256"
    if _list_of_files(one) == _list_of_files(other):
        return f"both were made from the same {one.source.num_files} files"
    return None


def _list_of_files(manifest: Manifest) -> tuple[str, int]:
    return manifest.source.sha256, manifest.source.num_files


def _are_comparable(one: Shards, other: Shards) -> bool:
    # Of the folders: a palette may read jpeg shards as ids.
    if Manifest.read(one.directory).kind != Manifest.read(other.directory).kind:
        return False
    return all(
        sum(shard.num_bytes for shard in folder.manifest.shards) <= READ_AT_MOST
        # What lies behind a URL is not fetched for this.
        and all((folder.directory / shard.name).exists() for shard in folder.manifest.shards)
        for folder in (one, other)
    )


def _digests(folder: Shards) -> Iterator[bytes]:
    """Yield a hash of each sample's bytes."""
    for shard in folder.manifest.shards:
        reader = ShardReader(folder.directory / shard.name)
        content = reader.open_map()
        places = zip(reader.index.offsets, reader.index.lengths, strict=True)
        for start, length in places:
            yield hashlib.blake2b(content[start : start + length].data, digest_size=16).digest()


def training_shards(config: RunConfig) -> Iterator[Shards]:
    """Yield the folders of `data.train`, then those of the run that fine-tuning started from.

    Shards that are gone are reported on standard error: nobody knows whether it has images of the
    test set.
    """
    for source in config.data.train_sources:
        try:
            yield find_shards(source.path, cache=config.data.cache)
        except UserError as error:
            sys.stderr.write(f"not compared with the test images: {error}\n")
    source_run = config.finetune and config.finetune.from_run
    path = Path(source_run or "") / "config.yaml"
    if source_run and path.exists():
        yield from training_shards(load_config(path).config)
