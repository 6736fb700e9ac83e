"""A process that reads its rank's samples of a data set in training order, without torch.

    python store_reader.py URL CACHE LIMIT WINDOW RANK RANKS STEPS OUT

Samples are read by threads, in micro-batches of three, and saved in the order of their positions.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megavis.data.loading.dataset import ShardDataset

MICRO = 3


def read(url: str, cache: str, limit: int, window: int, rank: int, ranks: int, steps: int):
    """Return tokens `[steps * MICRO, n]`."""
    dataset = ShardDataset(url, cache=cache, cache_limit=limit, window_shards=window)
    order = dataset.order(5)

    def batch(step: int) -> np.ndarray:
        positions = np.arange(MICRO) + (step * ranks + rank) * MICRO
        return dataset.read(order.dataset_index(positions))[0]

    with ThreadPoolExecutor(3) as pool:
        return np.concatenate(list(pool.map(batch, range(steps))))


if __name__ == "__main__":
    url, cache, *numbers, out = sys.argv[1:]
    np.save(out, read(url, cache, *map(int, numbers)))
