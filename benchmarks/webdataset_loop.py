"""Samples per second of a webdataset loop with our decoder, and of our own reader.

    OMP_NUM_THREADS=1 python -m benchmarks.webdataset_loop

Shards of synthetic palette tokens at 32² and 64² and of JPEG photographs at 224² are read whole in
one thread: by webdataset in order and through a buffer of 1,000 samples, by our reader shuffled.
All shards are in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import webdataset as wds

from benchmarks.made_shards import make_folder
from benchmarks.palette_shards import processor, run_verb, write_crops
from benchmarks.timing import parser, ratio, report, take_turns
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import read_batch
from megavis.data.loading.webdataset_decoder import ShardDecoder

BATCH, BUFFER, IN_SHARD = 64, 1_000, 1_000
_SIZE = 224


def ours(folder: Path) -> Callable[[], None]:
    """Return a function that reads a folder once, in another order each time."""
    dataset, epoch = ShardDataset(folder), 0
    order = dataset.order(0)

    def read() -> None:
        nonlocal epoch
        start = epoch * len(dataset)
        for begin in range(start, start + len(dataset), BATCH):
            positions = np.arange(begin, min(begin + BATCH, start + len(dataset)))
            read_batch(dataset, order.dataset_index(positions), positions)
        epoch += 1

    return read


def webdatasets(folder: Path, suffix: str, *, buffer: int) -> Callable[[], None]:
    """Return a function that reads a folder once by webdataset, shuffled in a buffer if not 0."""
    decoder = ShardDecoder(folder)
    urls = [str(folder / shard.name) for shard in decoder.manifest.shards]

    def read() -> None:
        shuffled = len(urls) if buffer else False
        samples = wds.WebDataset(urls, shardshuffle=shuffled).decode(decoder)
        samples = samples.map(decoder.with_label)
        samples = samples.shuffle(buffer) if buffer else samples
        for rows, labels in samples.to_tuple(suffix, "cls").batched(BATCH):
            torch.from_numpy(np.stack(rows)), torch.as_tensor(np.array(labels))

    return read


def folders(root: Path, options: argparse.Namespace) -> dict[str, tuple[Path, str]]:
    """Write the shards; return folder and suffix by name."""
    made = {}
    for side in (32, 64):
        made[f"palette, {side}²"] = (root / f"palette{side}", "tok")
        shape = {"num_shards": options.shards, "in_shard": IN_SHARD, "side": side}
        make_folder(root / f"palette{side}", empty=False, **shape)
    (root / "images").mkdir()
    write_crops(root / "images", count=options.images)
    out = ("--out", root / "jpeg", "--size", _SIZE, "--samples-per-shard", options.images // 2)
    run_verb("jpeg", root / "images", *out)
    made[f"jpeg, {_SIZE}²"] = (root / "jpeg", "jpg")
    return made


def measure(options: argparse.Namespace, root: Path) -> list[dict[str, object]]:
    """Time every contestant; return a row for each."""
    ways: dict[str, dict[str, Callable[[], None]]] = {}
    counts = {}
    for name, (folder, suffix) in folders(root, options).items():
        counts[name] = len(ShardDataset(folder))
        ways[name] = {
            "ShardDataset, shuffled": ours(folder),
            "webdataset, in order": webdatasets(folder, suffix, buffer=0),
            f"webdataset, buffer of {BUFFER:,}": webdatasets(folder, suffix, buffer=BUFFER),
        }
    rows: list[dict[str, object]] = []
    for name, contestants in ways.items():
        taken = take_turns(contestants, rounds=options.rounds)
        wall = {way: [one.wall for one in rounds] for way, rounds in taken.items()}
        cpu = {way: [one.cpu for one in rounds] for way, rounds in taken.items()}
        first = next(iter(contestants))
        rows += [
            {
                "shards": name,
                "read by": way,
                "samples/s": round(counts[name] / statistics.median(wall[way])),
                "samples/s of CPU": round(counts[name] / statistics.median(cpu[way])),
                "of ours by CPU": ratio(cpu[first], cpu[way]),
            }
            for way in contestants
        ]
    return rows


def main() -> None:
    """Run the benchmark."""
    made = parser("A webdataset loop with our decoder, and our reader.")
    made.add_argument("--shards", type=int, default=10, help=f"of {IN_SHARD:,} made-up samples")
    made.add_argument("--images", type=int, default=400, help="photographs; default: 400")
    options = made.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"shards": options.shards, "images": options.images}
        report(measure(options, Path(folder)), options.json, processor=processor(), **sizes)


if __name__ == "__main__":
    main()
