"""Detect evaluation images in the training data.

Compares the SHA-256 of shards and of lists of source files in the manifests and, for folders that
are not too large, the bytes of the samples.
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
from megavis.data.format.sample_index import SampleIndex
from megavis.data.format.shards import map_file
from megavis.data.loading.remote import RemoteFolder, is_remote

MAX_BYTES_TO_COMPARE = 1 << 28
"""Largest folder whose samples are compared; for larger ones only the manifests are."""
TOLERATED_FRACTION = 0.01
"""Fraction of equal samples that is accepted: published test sets have duplicates, and crops of a
uniform colour are equal."""


class Shards(Protocol):
    """A shard folder: `ShardDataset` or `FoundShards`.

    Attributes:
        directory: path of the folder.
        manifest: description of its samples.
    """

    @property
    def directory(self) -> Path: ...  # noqa: D102 - see above
    @property
    def manifest(self) -> Manifest: ...  # noqa: D102 - see above


@dataclass(frozen=True)
class FoundShards:
    """A shard folder whose manifest was read, but not its indexes."""

    directory: Path
    manifest: Manifest


def find_shards(
    path: str, *, cache: str | None = None, cache_limit: int | None = None
) -> FoundShards:
    """Read the manifest of a shard folder or URL. Raises UserError as `Manifest.read`."""
    directory = Path(path)
    if is_remote(path):
        directory = RemoteFolder.open(path, cache, limit=cache_limit).directory
    return FoundShards(directory, Manifest.read(directory))


def check_no_overlap(held_out: Shards, trained_on: Iterable[Shards]) -> int | None:
    """Check that held-out images were not trained on.

    Args:
        held_out: a test or validation set.
        trained_on: training data of weights and classifiers; may repeat a folder.

    Returns:
        Number of samples of `held_out` that the others contain too, at most 1 % in each; None if
        some samples could not be compared.

    Raises:
        UserError: they overlap; names both folders.
    """
    # Deduplicate: most runs are probed on their own training data.
    folders = {folder.directory.resolve(): folder for folder in trained_on}
    counts = [_compare(held_out, folder) for folder in folders.values()]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _compare(held_out: Shards, folder: Shards) -> int | None:
    """Count equal samples; return None if they cannot be compared."""
    reason = overlap_of_manifests(held_out.manifest, folder.manifest)
    equal = None
    if reason is None and _are_comparable(held_out, folder):
        # Count duplicates once: recordings of silence are all equal.
        equal = len(set(_digests(folder)).intersection(_digests(held_out)))
        num_samples = held_out.manifest.num_samples
        if equal > TOLERATED_FRACTION * num_samples:
            reason = f"{equal} of its {num_samples} samples are in both"
    if reason is not None:
        raise UserError(
            f"{held_out.directory} cannot evaluate what was trained on {folder.directory}: {reason}"
        )
    return equal


def overlap_of_manifests(one: Manifest, other: Manifest) -> str | None:
    """Return a clause on why two manifests describe the same images, or None if they do not."""
    names = {shard.sha256: shard.name for shard in other.shards}
    for shard in one.shards:
        if shard.sha256 in names:
            return f"its {shard.name} has the SHA-256 of the other's {names[shard.sha256]}"
    if _list_of_files(one) == _list_of_files(other):
        return f"both were made from the same {one.source.num_files} files"
    return None


def _list_of_files(manifest: Manifest) -> tuple[str, int]:
    return manifest.source.sha256, manifest.source.num_files


def _are_comparable(one: Shards, other: Shards) -> bool:
    # Compare stored kinds: with a palette, the manifests of JPEG shards say ids.
    if Manifest.read(one.directory).kind != Manifest.read(other.directory).kind:
        return False
    return all(
        sum(shard.num_bytes for shard in folder.manifest.shards) <= MAX_BYTES_TO_COMPARE
        # Shards behind a URL are not fetched for this.
        and all((folder.directory / shard.name).exists() for shard in folder.manifest.shards)
        for folder in (one, other)
    )


def _digests(folder: Shards) -> Iterator[bytes]:
    """Yield a hash of each sample's bytes."""
    index = SampleIndex(folder.directory, folder.manifest)
    for number, shard in enumerate(folder.manifest.shards):
        content = map_file(folder.directory / shard.name)
        records = index.of_shard(number)
        for start, length in zip(
            records["offset"].tolist(), records["length"].tolist(), strict=True
        ):
            yield hashlib.blake2b(content[start : start + length].data, digest_size=16).digest()


def training_shards(config: RunConfig) -> Iterator[Shards]:
    """Yield the folders of `data.train`, then the training folders of the run that was fine-tuned.

    Missing shards are reported on standard error, since they cannot be compared.
    """
    data = config.data
    for source in data.train_sources:
        try:
            yield find_shards(source.path, cache=data.cache, cache_limit=data.cache_limit)
        except UserError as error:
            sys.stderr.write(f"not compared with the test images: {error}\n")
    source_run = config.finetune and config.finetune.from_run
    path = Path(source_run or "") / "config.yaml"
    if source_run and path.exists():
        yield from training_shards(load_config(path).config)
