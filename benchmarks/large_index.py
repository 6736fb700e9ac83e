"""Opening a shard folder of a hundred million samples, in several processes at once.

    OMP_NUM_THREADS=1 python -m benchmarks.large_index --samples 100_000_000

Makes the index of shards of 10,000 samples, with sparse files as tars, in a temporary folder (16
bytes a sample on the disk), and opens it in processes that start together, after another has read
it into the page cache. `before` and `opened` are MB of a process's resident memory (RSS) before it
opens the folder, with all imports, and after; `read` after it has also read a thousand batches of
the order in windows. PSS divides pages by the number of processes that map them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.made_shards import make_folder
from benchmarks.timing import parser, report
from megavis.data.format.sample_index import SAMPLE_INDEX_NAME
from megavis.data.loading.dataset import ShardDataset

DESCRIPTORS, IN_SHARD, SIDE, WINDOW, BATCH = 1_024, 10_000, 64, 64, 64


def memory() -> tuple[float, float]:
    """Return this process's resident memory and its share of it, RSS and PSS, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return found["Rss"] / 1_000, found["Pss"] / 1_000


def open_and_read(folder: Path, batches: int) -> dict[str, float]:
    """Open a folder, and read batches; return seconds and memory."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    before, pss_before = memory()
    begin, cpu = time.perf_counter(), time.process_time()
    dataset = ShardDataset(folder, window_shards=WINDOW)
    order = dataset.order(0)
    order.dataset_index(np.arange(BATCH))
    seconds, of_cpu = time.perf_counter() - begin, time.process_time() - cpu
    opened, pss_opened = memory()
    for number in range(batches):
        dataset.read(order.dataset_index(np.arange(BATCH) + number * BATCH))
    read, pss_read = memory()
    return {
        "seconds": seconds,
        "CPU seconds": of_cpu,
        "before": before,
        "opened": opened,
        "read": read,
        "PSS before": pss_before,
        "PSS opened": pss_opened,
        "PSS read": pss_read,
    }


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Return a row for the processes of each round: medians over them."""
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, object]] = []
    for number in range(options.rounds + 1):  # the first warms the page cache
        with context.Pool(options.processes) as pool:
            asked = [(folder, options.batches)] * options.processes
            found = pool.starmap(open_and_read, asked, chunksize=1)
        if number:
            middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
            rows.append({"round": number, **middle})
    return rows


def main() -> None:
    """Run the benchmark."""
    made = parser("Opening a shard folder of a hundred million samples.")
    made.add_argument("--samples", type=int, default=100_000_000, help="default: 100,000,000")
    made.add_argument("--processes", type=int, default=4, help="that open it at once")
    made.add_argument("--batches", type=int, default=1_000, help="that each then reads")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, begin = Path(root) / "shards", time.perf_counter()
        count = options.samples // IN_SHARD
        make_folder(folder, num_shards=count, in_shard=IN_SHARD, side=SIDE, empty=True)
        about = {
            "made_in_s": round(time.perf_counter() - begin),
            "samples": options.samples,
            "shards": count,
            "index_GB": round((folder / SAMPLE_INDEX_NAME).stat().st_size / 1e9, 2),
            "processes": options.processes,
        }
        report(measure(options, folder), options.json, **about)


if __name__ == "__main__":
    main()
