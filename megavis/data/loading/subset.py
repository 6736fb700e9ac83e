"""Subsets of a shard folder, and random halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megavis.data.loading.dataset import ShardDataset


class Subset:
    """Samples of a data set, in an order of their own.

    Attributes:
        indices: int64 `[m]`, the samples of the whole.
    """

    def __init__(self, whole: ShardDataset, indices: np.ndarray) -> None:
        self.whole, self.indices = whole, indices

    @property
    def directory(self) -> Path:
        """The shard folder."""
        return self.whole.directory

    def __len__(self) -> int:
        return len(self.indices)

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read samples, as the whole does; indices int64 `[b]` count within the subset."""
        return self.whole.read(self.indices[indices], positions=positions)


def shuffled(dataset: ShardDataset) -> Subset:
    """Return all samples in an order that depends on their number alone, never on a run's seed.

    So the first ones are of all classes, also where a folder lies in the order of its classes.
    """
    # Imported here: tools that only list or write shards start without torch.
    import torch

    from megavis.parallel.random import uniform

    draws = uniform(torch.arange(len(dataset)), 1, seed=0, purpose="subset")[:, 0]
    return Subset(dataset, draws.argsort(stable=True).numpy())


def halves(dataset: ShardDataset) -> tuple[Subset, Subset]:
    """Return two halves of the shuffled data set, which have no sample in common."""
    order = shuffled(dataset).indices
    middle = (len(order) + 1) // 2
    return Subset(dataset, order[:middle]), Subset(dataset, order[middle:])
