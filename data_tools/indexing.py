"""`index`: build the index of finished shards again, from their JSON indexes."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_tools.engines import over_shards
from data_tools.job_report import say
from data_tools.jobs import JobSlice
from data_tools.out_lock import hold_out
from megavis.config.errors import UserError, counted
from megavis.data.format.manifest import Manifest
from megavis.data.format.sample_index import SAMPLE_INDEX_NAME, finish_folder


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `index` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0 for none")


def run_index(arguments: argparse.Namespace) -> int:
    """Write the index. Raises UserError without a manifest, and OSError."""
    directory: Path = arguments.directory
    if arguments.workers < 0:
        raise UserError("--workers must not be negative")
    manifest = Manifest.read(directory)
    with hold_out(directory, JobSlice()), over_shards(arguments.workers) as each:
        for partial in directory.glob(f".{SAMPLE_INDEX_NAME}.partial-*"):  # of a killed command
            partial.unlink(missing_ok=True)
        finish_folder(directory, manifest, each)
    num_bytes = (directory / SAMPLE_INDEX_NAME).stat().st_size
    samples, shards = manifest.num_samples, len(manifest.shards)
    what = f"{counted(samples, 'sample')} in {counted(shards, 'shard')}"
    say(f"{directory / SAMPLE_INDEX_NAME}: {what}, {num_bytes / samples:.1f} bytes a sample")
    return 0
