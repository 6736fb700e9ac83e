"""`palette shards`: an image folder becomes a folder of palette tokens that training reads.

The manifest is written last: a folder with one is finished.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from data_tools import __version__
from data_tools.decode import decoder_versions
from data_tools.report import say
from data_tools.resize import CROP, RESIZE
from data_tools.sources import ImageFolder, list_images
from data_tools.units import make_shards, plan_units
from megavis.config.errors import UserError
from megavis.data.files import sha256_of_file, write_atomically
from megavis.data.manifest import (
    FORMAT_VERSION,
    PALETTE_NAME,
    Manifest,
    Preparation,
    ShardEntry,
    Source,
    TokenizerIdentity,
)
from megavis.data.shards import ShardIndex, index_path
from megavis.tokenizers.palette import Palette

REPORT_NAME = "report.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette shards` to its parser."""
    parser.add_argument("image_folder", type=Path)
    parser.add_argument("--palette", type=Path, required=True, help="a .npy file of `palette fit`")
    parser.add_argument("--out", type=Path, required=True, help="the shard folder")
    parser.add_argument("--size", type=int, required=True, help="side of the images: 32, 48, 64")
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle before sharding")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one alone")
    parser.add_argument(
        "--classes-from", type=Path, help="a shard folder whose class numbers to share"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write a shard folder and say what is in it. Raises UserError and OSError."""
    if min(arguments.size, arguments.samples_per_shard) < 1:
        raise UserError("--size and --samples-per-shard must be at least 1")
    if min(arguments.seed, arguments.workers) < 0:
        raise UserError("--seed and --workers must not be negative")
    out = arguments.out
    if out.resolve().is_relative_to(arguments.image_folder.resolve()):
        raise UserError(f"--out {out} lies inside the image folder: choose another place")
    palette = Palette.load(arguments.palette)
    known = Manifest.read(arguments.classes_from).class_names if arguments.classes_from else None
    folder = list_images(arguments.image_folder, class_names=known)
    _prepare(out, palette)
    units = list(
        plan_units(
            folder,
            palette=palette,
            out=out,
            size=arguments.size,
            samples_per_shard=arguments.samples_per_shard,
            seed=arguments.seed,
        )
    )
    indexes = make_shards(units, workers=arguments.workers)
    skipped = _write_report(out, folder, indexes)
    if not any(len(index) for index in indexes):
        raise UserError(f"no file of {folder.root} gives an image; {out / REPORT_NAME} says why")
    manifest = _manifest(
        folder, palette=palette, indexes=indexes, skipped=skipped, out=out, arguments=arguments
    )
    manifest.write(out)
    say(f"{out}: {manifest.num_samples} samples in {len(manifest.shards)} shards")
    for reason, names in skipped.items():
        say(f"  skipped, {reason}: {len(names)} (the first: {names[0]})")
    return 0


def _prepare(out: Path, palette: Palette) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / PALETTE_NAME
    if path.exists() and Palette.load(path).sha256 != palette.sha256:
        raise UserError(f"{out} holds shards of another palette: choose another --out")
    for partial in out.glob(".*.partial-*"):  # of a run that was killed
        partial.unlink()
    palette.save(path)


def _write_report(
    out: Path, folder: ImageFolder, indexes: list[ShardIndex]
) -> dict[str, list[str]]:
    """Write `report.json`; return the names of refused files by reason, both sorted."""
    skipped: dict[str, list[str]] = defaultdict(list)
    for name, reason in sorted(entry for index in indexes for entry in index.skipped):
        skipped[reason].append(name)
    report = {
        "num_files": len(folder.files),
        "num_samples": sum(len(index) for index in indexes),
        "skipped": dict(sorted(skipped.items())),
    }
    write_atomically(out / REPORT_NAME, json.dumps(report, indent=2).encode() + b"\n")
    return dict(sorted(skipped.items()))


def _manifest(
    folder: ImageFolder,
    *,
    palette: Palette,
    indexes: list[ShardIndex],
    skipped: dict[str, list[str]],
    out: Path,
    arguments: argparse.Namespace,
) -> Manifest:
    shards = tuple(
        ShardEntry(
            name=index.shard,
            num_samples=len(index),
            num_bytes=index.num_bytes,
            sha256=index.sha256,
            index_sha256=sha256_of_file(index_path(out / index.shard)),
        )
        for index in indexes
        if len(index)
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        kind="palette",
        image_size=arguments.size,
        num_tokens=arguments.size**2,
        tokenizer=TokenizerIdentity(
            kind="palette", sha256=palette.sha256, num_tokens=palette.num_tokens
        ),
        preparation=Preparation(resize=RESIZE, crop=CROP, decoders=decoder_versions()),
        class_names=folder.class_names,
        shards=shards,
        skipped={reason: len(names) for reason, names in skipped.items()},
        seed=arguments.seed,
        source=Source(
            description=f"image folder {folder.root.name}",
            num_files=len(folder.files),
            sha256=folder.sha256,
        ),
        tool_version=__version__,
    )
