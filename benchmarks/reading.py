"""Cost of reading shards, compared with its lower bound.

    OMP_NUM_THREADS=1 python -m benchmarks.reading

Palette tokens at 32², shuffled, in one thread and through the loader; JPEGs of 500x375 with the
random resized crop of Masked Autoencoders Are Scalable Vision Learners (appendix A.1) at 224²,
compared with a loop that only decodes the same files and resizes the same crops.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.palette_shards import run_verb, write_crops
from benchmarks.timing import parser, ratio, report, take_turns
from megavis.data.codecs.crops import cut, random_window, resize
from megavis.data.codecs.jpeg import decode_rgb
from megavis.data.codecs.transforms import Transform
from megavis.data.format.shards import ShardReader
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader, read_batch
from megavis.tokenizers.palette import Palette

PALETTE_SIZE, CROP = 32, Transform(image_size=224, crop="random_resized", flip=True, seed=1)


def shards(folder: Path, count: int) -> tuple[ShardDataset, ShardDataset]:
    """Write `count` photographs as palette and as JPEG shards; return both data sets."""
    (folder / "images").mkdir()
    write_crops(folder / "images", count=count)
    centers = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    Palette(centers).save(folder / "palette.npy")
    palette, jpeg = folder / "palette", folder / "jpeg"
    options = ["--palette", folder / "palette.npy", "--size", PALETTE_SIZE]
    run_verb("palette", "shards", folder / "images", "--out", palette, *options)
    run_verb("jpeg", folder / "images", "--out", jpeg)
    return ShardDataset(palette), ShardDataset(jpeg, CROP)


def in_this_thread(dataset: ShardDataset, batch_size: int, count: int) -> Callable[[], None]:
    """Return a function that reads `count` shuffled samples, from another epoch each time."""
    order, begin = dataset.order(0), 0

    def read() -> None:
        nonlocal begin
        for start in range(begin, begin + count, batch_size):
            positions = np.arange(start, start + batch_size)
            read_batch(dataset, order.dataset_index(positions), positions)
        begin += count

    return read


def through_the_loader(
    dataset: ShardDataset, batch_size: int, count: int, threads: int
) -> Callable[[], None]:
    """Return a function that takes `count` samples from a loader with `threads` threads."""
    loader = BatchLoader(
        dataset,
        seed=0,
        micro_batch_size=batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        threads=threads,
    )

    def read() -> None:
        # The loader stays open, so prefetched batches carry over to the next round.
        for _ in range(count // batch_size):
            next(loader)

    return read


def decode_and_resize(dataset: ShardDataset, files: list[bytes], count: int) -> Callable[[], None]:
    """Return the lower bound for the same crops: files in memory, random numbers precomputed."""
    positions = np.arange(count)
    places = dataset.order(0).dataset_index(positions).tolist()
    draws = CROP.draws(positions)

    def read() -> None:
        for place, draw in zip(places, draws, strict=True):
            image = decode_rgb(files[place])
            height, width = image.shape[:2]
            window = random_window(height, width, draw[1:], scale=CROP.scale, ratio=CROP.ratio)
            resize(cut(image, window), height=CROP.image_size, width=CROP.image_size)

    return read


def stored_files(folder: Path, dataset: ShardDataset) -> list[bytes]:
    """Return the JPEG files of a data set, in its order."""
    readers = [ShardReader(folder / shard.name) for shard in dataset.manifest.shards]
    return [reader.read(place).tobytes() for reader in readers for place in range(len(reader))]


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Time every contestant; return a row for each."""
    palette, jpeg = shards(folder, options.images)
    many, few = options.samples, options.images
    files = stored_files(folder / "jpeg", jpeg)
    ways = {
        "palette 32², batches of 128": (in_this_thread(palette, 128, many), many),
        "palette 32², batches of 16": (in_this_thread(palette, 16, many), many),
        "palette 32², loader, 1 thread": (through_the_loader(palette, 128, many, 1), many),
        "JPEG: decode and resize alone": (decode_and_resize(jpeg, files, few), few),
        "JPEG, MAE's crop": (in_this_thread(jpeg, 50, few), few),
        "JPEG, loader, 1 thread": (through_the_loader(jpeg, 50, few, 1), few),
        "JPEG, loader, 2 threads": (through_the_loader(jpeg, 50, few, 2), few),
    }
    taken = take_turns({name: way for name, (way, _) in ways.items()}, rounds=options.rounds)
    wall = {name: [one.wall for one in rounds] for name, rounds in taken.items()}
    cpu = {name: [one.cpu for one in rounds] for name, rounds in taken.items()}
    bound = "JPEG: decode and resize alone"
    return [
        {
            "reading": name,
            "images/s": round(count / statistics.median(wall[name])),
            "images/s of CPU": round(count / statistics.median(cpu[name])),
            "of decode + resize": ratio(wall[bound], wall[name]) if "JPEG" in name else "",
            "by CPU": ratio(cpu[bound], cpu[name]) if "JPEG" in name else "",
        }
        for name, (_, count) in ways.items()
    ]


def main() -> None:
    """Run the benchmark."""
    made = parser("Reading shards, shuffled.")
    made.add_argument("--images", type=int, default=400, help="photographs; default: 400")
    made.add_argument("--samples", type=int, default=51_200, help="palette samples per round")
    options = made.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report(measure(options, Path(folder)), options.json, images=options.images)


if __name__ == "__main__":
    main()
