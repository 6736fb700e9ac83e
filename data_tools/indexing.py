"""`index`: rebuild the index of finished shards from their JSON indexes.

The records of each shard are kept in a hidden file until the index is complete, so that a rerun
after a kill resumes with the next shard, without rereading earlier JSON indexes.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_tools.engines import process_map
from data_tools.job_report import say
from data_tools.jobs import add_workers_argument
from data_tools.out_lock import hold_out
from megavis.data.format.manifest import Manifest, ShardEntry
from megavis.data.format.sample_index import (
    RECORD,
    SAMPLE_INDEX_NAME,
    Each,
    finish_folder,
    source_of,
)


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `index` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")
    add_workers_argument(parser)


def run_index(arguments: argparse.Namespace) -> int:
    """Write the index. Raises UserError without a manifest, and OSError."""
    directory: Path = arguments.directory
    manifest = Manifest.read(directory)
    with hold_out(directory), process_map(arguments.workers) as each:
        for partial in directory.glob(f".{SAMPLE_INDEX_NAME}.partial-*"):  # from a killed command
            partial.unlink(missing_ok=True)
        listed = directory / f".{SAMPLE_INDEX_NAME}.listed"
        finish_folder(directory, manifest, _keeping(listed, each))
        listed.unlink()
    num_bytes = (directory / SAMPLE_INDEX_NAME).stat().st_size
    per_sample = num_bytes / manifest.num_samples
    say(f"{directory / SAMPLE_INDEX_NAME}: {manifest.size}, {per_sample:.1f} bytes a sample")
    return 0


def _keeping(path: Path, each: Each) -> Each:
    """Return `each` for `listed_records` that also keeps its results in a file for a rerun.

    The file holds a hash of what the index is built from, and for each shard its records and their
    SHA-256.
    """

    def kept(
        listed: Callable[[ShardEntry], np.ndarray], shards: Iterable[ShardEntry]
    ) -> Iterator[np.ndarray]:
        shards = [*shards]
        path.touch()
        with path.open("r+b") as file:
            done = 0
            for records in _found(file, shards):
                done += 1
                yield records
            for records in each(listed, shards[done:]):
                file.write(records.data)
                file.write(hashlib.sha256(records.data).digest())
                file.flush()
                yield records

    return kept


def _found(file: BinaryIO, shards: Sequence[ShardEntry]) -> Iterator[np.ndarray]:
    """Yield the records of the first shards from a file; leave it positioned for the next ones."""
    source = source_of(shards)
    if file.read(len(source)) != source:
        _cut(file, 0)
        file.write(source)
        return
    for shard in shards:
        start = file.tell()
        content = file.read(RECORD.itemsize * shard.num_samples)
        if file.read(len(source)) != hashlib.sha256(content).digest():
            _cut(file, start)
            return
        yield np.frombuffer(content, RECORD)


def _cut(file: BinaryIO, size: int) -> None:
    file.seek(size)
    file.truncate()
