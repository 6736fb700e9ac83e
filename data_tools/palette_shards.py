"""`palette shards`: an image folder becomes shards of palette tokens.

One unit of work is one shard: a fixed slice of the shuffled list of source files. So units do not
depend on each other, any number of workers gives the same bytes, and a rerun after a crash redoes
only what is missing. A unit is finished when its index stands beside its tar, and the folder is
finished when the manifest stands there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools import __version__
from data_tools.decode import RefusedImageError, decoder_versions
from data_tools.report import Progress, say
from data_tools.resize import CROP, RESIZE
from data_tools.sources import ImageFolder, SourceFile, list_images, load_square
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
from megavis.data.shards import Sample, ShardIndex, index_path, write_index, write_shard
from megavis.tokenizers.palette import Palette

REPORT_NAME = "report.json"


@dataclass(frozen=True)
class Unit:
    """The work of one shard; small enough to send to another process.

    Attributes:
        path: the tar to write.
        root: the image folder.
        files: `(place in the sorted list, file)`: the place is the sample's key.
        size: side of the image.
        palette_path: the palette.
        job: identity of the whole job.
    """

    path: Path
    root: Path
    files: tuple[tuple[int, SourceFile], ...]
    size: int
    palette_path: Path
    job: str


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


def plan_units(
    folder: ImageFolder,
    *,
    palette: Palette,
    out: Path,
    size: int,
    samples_per_shard: int,
    seed: int,
) -> Iterator[Unit]:
    """Cut the shuffled list of files into units of `samples_per_shard` files."""
    settings = {
        "format": FORMAT_VERSION,
        "palette": palette.sha256,
        "size": size,
        "preparation": [RESIZE, CROP, decoder_versions()],
        "samples_per_shard": samples_per_shard,
        "seed": seed,
        "source": folder.sha256,
        "classes": folder.class_names,
    }
    job = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    order = np.random.default_rng(seed).permutation(len(folder.files)).tolist()
    for number, start in enumerate(range(0, len(order), samples_per_shard)):
        places = order[start : start + samples_per_shard]
        yield Unit(
            path=out / f"shard-{number:06d}.tar",
            root=folder.root,
            files=tuple((place, folder.files[place]) for place in places),
            size=size,
            palette_path=out / PALETTE_NAME,
            job=job,
        )


def make_shards(units: list[Unit], *, workers: int) -> list[ShardIndex]:
    """Do what is missing of `units`; return the index of every one, in their order.

    Raises:
        UserError: the folder holds shards of another job, or a worker was killed.
    """
    indexes = {unit.path: index for unit in units if (index := finished_index(unit)) is not None}
    if indexes:
        say(f"{len(indexes)} of {len(units)} shards are there already")
    missing = [unit for unit in units if unit.path not in indexes]
    total = sum(len(unit.files) for unit in missing)
    with Progress("palette shards", total=total) as progress:
        if workers == 0:
            for unit in missing:
                indexes[unit.path] = make_shard(unit, advance=progress.advance)
        else:
            for unit, index in _make_in_processes(missing, workers=workers):
                indexes[unit.path] = index
                progress.advance(len(unit.files))
        if total:
            say(f"{total} images at {progress.rate:.0f} images/s")
    return [indexes[unit.path] for unit in units]


def finished_index(unit: Unit) -> ShardIndex | None:
    """Return the index of a unit whose bytes are whole, None where it must be done (again).

    Raises:
        UserError: it is the work of another job, which must not be overwritten.
    """
    path = index_path(unit.path)
    try:
        index = ShardIndex.from_json(path.read_bytes(), path=path)
    except (FileNotFoundError, UserError):
        return None
    if index.job != unit.job:
        raise UserError(
            f"{unit.path.parent} holds shards made from other images or settings: "
            "choose another --out, or delete it"
        )
    if not len(index):  # every file was refused: there is no tar
        return index
    whole = unit.path.is_file() and sha256_of_file(unit.path) == index.sha256
    return index if whole else None


def make_shard(unit: Unit, *, advance: Callable[[], None] | None = None) -> ShardIndex:
    """Write the tar and the index of one unit; call `advance` after each file. Raises OSError."""
    palette = _load_palette(unit.palette_path)
    skipped: list[list[str]] = []

    def samples() -> Iterator[Sample]:
        for place, file in unit.files:
            try:
                image = load_square(unit.root, file, size=unit.size)
            except RefusedImageError as refusal:
                skipped.append([file.name, str(refusal)])
            else:
                tokens = palette.encode(image).reshape(-1)
                yield Sample(f"{place:09d}", tokens, file.label, file.name)
            if advance is not None:
                advance()

    index = write_shard(unit.path, samples(), job=unit.job)
    index.skipped = skipped
    if not len(index):
        unit.path.unlink()
    write_index(unit.path, index)
    return index


@functools.lru_cache(maxsize=1)
def _load_palette(path: Path) -> Palette:
    # Kept between the units of one process: its table of all colours takes seconds to build.
    return Palette.load(path)


def _make_in_processes(units: list[Unit], *, workers: int) -> Iterator[tuple[Unit, ShardIndex]]:
    # Spawned, not forked: the parent may hold threads, and a forked lock never opens.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(make_shard, unit): unit for unit in units}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); what is finished is kept: run the "
                "same command again, perhaps with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare(out: Path, palette: Palette) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / PALETTE_NAME
    if path.exists() and Palette.load(path).sha256 != palette.sha256:
        raise UserError(f"{out} holds shards of another palette: choose another --out")
    for partial in out.glob(".*.partial-*"):  # of a run that was killed
        partial.unlink()
    palette.save(path)
    _load_palette.cache_clear()


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
