"""`verify`: read every byte of a shard folder and report errors."""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import numpy as np

from data_tools.contact_sheet import whole_images
from data_tools.job_report import ProgressBar, say
from megavis.config.errors import UserError
from megavis.data.codecs.registry import suffix_of
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import PALETTE_NAME, Manifest, ShardEntry
from megavis.data.format.shards import ShardReader, index_path
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")


def run(arguments: argparse.Namespace) -> int:
    """Report errors and return 1, or return 0. Raises UserError without a manifest."""
    directory: Path = arguments.directory
    problems = find_problems(directory)
    for problem in problems:
        say(f"wrong: {problem}")
    manifest = Manifest.read(directory)
    if not problems:
        shards = len(manifest.shards)
        say(f"{directory}: {manifest.num_samples} samples in {shards} shards, all good")
    return 1 if problems else 0


def find_problems(directory: Path) -> list[str]:
    """Return a message for each error in a shard folder. Raises UserError without a manifest."""
    manifest = Manifest.read(directory)
    problems = [f"{name} is not in the manifest" for name in _strays(directory, manifest)]
    with ProgressBar("verifying", total=manifest.num_samples, unit="samples") as progress:
        for shard in manifest.shards:
            try:
                problems += shard_problems(directory, shard, manifest)
            except (UserError, OSError, tarfile.TarError) as error:
                problems.append(f"{shard.name}: {error}")
            progress.advance(shard.num_samples)
    return problems or sample_problems(directory)


def _strays(directory: Path, manifest: Manifest) -> list[str]:
    """Return tars that are not in the manifest, which other readers would read too."""
    known = {shard.name for shard in manifest.shards}
    return sorted(path.name for path in directory.glob("*.tar") if path.name not in known)


def shard_problems(directory: Path, shard: ShardEntry, manifest: Manifest) -> list[str]:
    """Compare one tar and its index with the manifest and with each other."""
    num_classes = len(manifest.class_names)
    path = directory / shard.name
    num_bytes = path.stat().st_size
    if num_bytes != shard.num_bytes:
        return [f"{shard.name} has {num_bytes} bytes, the manifest says {shard.num_bytes}"]
    if sha256_of_file(path) != shard.sha256:
        return [f"{shard.name} does not have the SHA-256 of the manifest"]
    if sha256_of_file(index_path(path)) != shard.index_sha256:
        return [f"{index_path(path).name} does not have the SHA-256 of the manifest"]
    index = ShardReader(path).index
    with tarfile.open(path) as tar:
        members = [(member.name, member.offset_data, member.size) for member in tar]
    names = [f"{key}.{suffix_of(manifest)}" for key in index.keys]
    if members != list(zip(names, index.offsets, index.lengths, strict=True)):
        return [f"{index_path(path).name} does not list the members of {shard.name}"]
    if len(set(index.keys)) < len(index.keys):
        return [f"{shard.name} has two samples with the same key"]
    return [
        f"{shard.name}:{key} has the label {label}, but there are {num_classes} classes"
        for key, label in zip(index.keys, index.labels, strict=True)
        if not -1 <= label < num_classes
    ]


def sample_problems(directory: Path) -> list[str]:
    """Decode every sample of a folder with intact shards; return messages."""
    try:
        dataset = ShardDataset(directory, whole_images(directory))
        palette = None
        if dataset.manifest.kind == "palette":
            palette = Palette.load(directory / PALETTE_NAME)
        for start in range(0, len(dataset), _BATCH):
            samples, _ = dataset.read(np.arange(start, min(start + _BATCH, len(dataset))))
            if palette is not None:
                palette.decode(samples)
    except (UserError, ValueError) as error:
        return [str(error)]
    return dataset.skipped_names
