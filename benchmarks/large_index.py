"""Opening a shard folder of a hundred million samples, in several processes at once.

    OMP_NUM_THREADS=1 python -m benchmarks.large_index --samples 100_000_000

Makes the index of shards of 10,000 samples, with sparse files as tars, in a temporary folder (16
bytes per sample on disk), and opens it in processes that start together, after another process has
read it into the page cache. `before` and `opened` are MB of a process's resident memory (RSS)
before it opens the folder, with all imports, and after; `read` is after it has also read a thousand
batches of the order in windows. PSS divides pages by the number of processes that map them.

With `--steps 10`, a tiny iGPT is then trained for that many steps on windows of 8² of the folder's
tokens, by as many torchrun processes, each of which reports its peak memory (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.made_shards import make_folder
from benchmarks.timing import parser, report
from data_tools.shard_tasks import peak_memory
from megavis.cli import main as megavis
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


_CONFIG = """\
name: large
output: {root}/runs
objective: {{name: igpt, mode: autoregressive}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 2}}
data: {{train: {folder}, image_size: 8, crop: window, window_shards: {window}, validation: null}}
parallel: {{zero_stage: 0}}
optimizer: {{learning_rate: 0.001}}
schedule: {{warmup_steps: 1}}
training: {{steps: {steps}, batch_size: 16, log_every: 1}}
checkpoint: {{every: {steps}}}
"""


def train(options: argparse.Namespace, root: Path, folder: Path) -> list[dict[str, object]]:
    """Train in torchrun processes; return a row for each."""
    config = root / "large.yaml"
    config.write_text(_CONFIG.format(root=root, folder=folder, window=WINDOW, steps=options.steps))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(options.processes), "--module", "benchmarks.large_index"]
    command += ["--train", str(config)]
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603 - this program itself
    seconds = time.perf_counter() - begin
    found = [json.loads(path.read_text()) for path in sorted(root.glob("rank-*.json"))]
    records = (root / "runs/large/metrics.jsonl").read_text().splitlines()
    losses = [each["loss"] for each in map(json.loads, records) if "loss" in each]
    return [
        {**one, "steps": len(losses), "last loss": losses[-1], "command_s": seconds}
        for one in found
    ]


def train_here(config: Path) -> None:
    """Train as one process of several, and write its memory next to the config."""
    if code := megavis(["train", str(config)]):
        sys.exit(code)
    _, share = memory()
    rank = os.environ["RANK"]
    told = {"rank": int(rank), "peak_MB": peak_memory() / 1e6, "PSS_MB": share}
    (config.parent / f"rank-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    """Run the benchmark."""
    made = parser("Opening a shard folder of a hundred million samples.")
    made.add_argument("--samples", type=int, default=100_000_000, help="default: 100,000,000")
    made.add_argument("--processes", type=int, default=4, help="that open it at once")
    made.add_argument("--batches", type=int, default=1_000, help="that each then reads")
    made.add_argument("--steps", type=int, default=0, help="of training after that; default: 0")
    made.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # a process of torchrun
    options = made.parse_args()
    if options.train is not None:
        train_here(options.train)
        return
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
        if options.steps:
            report(train(options, Path(root), folder), None, **about)


if __name__ == "__main__":
    main()
