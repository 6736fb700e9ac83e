"""Shards as units of work: what each one is, whether it is done, and the doing of it.

A unit is a fixed slice of the shuffled list of source files. Units do not depend on each other, so
any number of workers gives the same bytes, and a rerun after a crash redoes only what is missing.
A unit is finished when its index stands beside its tar.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.decode import RefusedImageError, decoder_versions
from data_tools.report import Progress, say
from data_tools.resize import CROP, RESIZE
from data_tools.sources import ImageFolder, SourceFile, load_square
from megavis.config.errors import UserError
from megavis.data.files import sha256_of_file
from megavis.data.manifest import FORMAT_VERSION, PALETTE_NAME
from megavis.data.shards import Sample, ShardIndex, index_path, write_index, write_shard
from megavis.tokenizers.palette import Palette


@dataclass(frozen=True)
class Unit:
    """The work of one shard; small enough to send to another process.

    Attributes:
        path: the tar to write.
        root: the image folder.
        files: `(place in the sorted list, file)`: the place is the sample's key.
        size: side of the image.
        palette_path, palette_sha256: the palette.
        job: identity of the whole job.
    """

    path: Path
    root: Path
    files: tuple[tuple[int, SourceFile], ...]
    size: int
    palette_path: Path
    palette_sha256: str
    job: str


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
            palette_sha256=palette.sha256,
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
    palette = _load_palette(unit.palette_path, unit.palette_sha256)
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
def _load_palette(path: Path, sha256: str) -> Palette:
    # Kept between the units of one process, for the table of colours that it has seen.
    palette = Palette.load(path)
    assert palette.sha256 == sha256
    return palette


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
