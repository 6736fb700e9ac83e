"""Reading at 10, 1,000 and 10,000 shards, with 1,024 descriptors, and with slow opening of files.

    OMP_NUM_THREADS=1 python -m benchmarks.many_shards

Shards of synthetic 64² palette tokens: ten are written, the others are hard links to them, so that
the page cache has all of them and the disk does not matter. A round reads all samples of one window
of shards once, so that every file is opened once per round. The order of all samples, for which
most samples reopen a file, reads fewer of them. `slow` sleeps before each open, like a network
disk.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.made_shards import make_folder
from benchmarks.timing import parser, ratio, report, take_turns
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch, Prefetcher, read_batch
from megavis.data.loading.open_shards import Content

DESCRIPTORS, SIDE, BATCH = 1_024, 64, 64


class Reading:
    """Reads a folder; a call reads as many samples as a window has."""

    def __init__(
        self, folder: Path, options: argparse.Namespace, *, windows: bool, delay: float
    ) -> None:
        self.dataset = ShardDataset(folder, window_shards=options.window if windows else None)
        self.opened = self.taken = 0
        self._delay, self._open_shard = delay, self.dataset._open_shard
        # Count opened files, and wait as for a slow disk.
        self.dataset._open_shard = self._open  # type: ignore[method-assign]
        self._order, self._threads = self.dataset.order(0), options.threads
        self.count = options.window * options.in_shard // (1 if windows else options.fewer)

    def _open(self, shard: int) -> Content:
        self.opened += 1
        if self._delay:
            time.sleep(self._delay)
        return self._open_shard(shard)

    def __call__(self) -> None:
        """Read the batches of a round in threads, as a loader does."""
        first, end = self.taken // BATCH, (self.taken + self.count) // BATCH
        with Prefetcher(self._read, first=first, end=end, threads=self._threads) as batches:
            for _ in batches:
                pass
        self.taken += self.count

    def _read(self, number: int) -> Batch:
        positions = np.arange(number * BATCH, (number + 1) * BATCH)
        return read_batch(self.dataset, self._order.dataset_index(positions), positions)


def measure(options: argparse.Namespace, root: Path) -> list[dict[str, object]]:
    """Time every contestant; return a row for each."""
    ways: dict[str, Reading] = {}
    for num_shards in (10, 1_000, 10_000):
        folder = root / str(num_shards)
        make_folder(
            folder, num_shards=num_shards, in_shard=options.in_shard, side=SIDE, empty=False
        )
        name = f"{num_shards:,} shards"
        if num_shards == 10:
            ways[name] = Reading(folder, options, windows=False, delay=0.0)
            ways[name].count = options.window * options.in_shard
            continue
        ways[f"{name}, windows"] = Reading(folder, options, windows=True, delay=0.0)
        if num_shards == 1_000:
            continue  # all contestants share the descriptors of this process
        slow = options.milliseconds / 1_000
        ways[f"{name}, windows, slow"] = Reading(folder, options, windows=True, delay=slow)
        ways[f"{name}, all samples"] = Reading(folder, options, windows=False, delay=0.0)
    contestants: dict[str, Callable[[], object]] = {**ways}
    taken = take_turns(contestants, rounds=options.rounds)
    wall = {n: [one.wall / ways[n].count for one in rounds] for n, rounds in taken.items()}
    cpu = {n: [one.cpu / ways[n].count for one in rounds] for n, rounds in taken.items()}
    first = next(iter(ways))
    return [
        {
            "reading": name,
            "samples/s": round(1 / statistics.median(wall[name])),
            "samples/s of CPU": round(1 / statistics.median(cpu[name])),
            "of 10 shards": ratio(wall[first], wall[name]),
            "by CPU": ratio(cpu[first], cpu[name]),
            "opened per 1,000": 1_000 * way.opened / way.taken,
        }
        for name, way in ways.items()
    ]


def main() -> None:
    """Run the benchmark."""
    made = parser("Reading at 10, 1,000 and 10,000 shards.")
    made.add_argument("--in-shard", type=int, default=1_000, help="samples in a shard")
    made.add_argument("--window", type=int, default=64, help="data.window_shards")
    made.add_argument("--threads", type=int, default=64, help="threads that read")
    made.add_argument("--milliseconds", type=float, default=10.0, help="delay of a slow open")
    made.add_argument("--fewer", type=int, default=16, help="all samples: a round is shorter")
    options = made.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
        sizes = {"in_shard": options.in_shard, "window": options.window, "threads": options.threads}
        report(rows, options.json, descriptors=DESCRIPTORS, **sizes)


if __name__ == "__main__":
    main()
