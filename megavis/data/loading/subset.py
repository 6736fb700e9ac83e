"""Subsets of a shard folder: random halves, and a few images of each class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.order import SampleOrder


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


class TrainingSubset(Subset):
    """A subset to train on, in the form of `Samples`."""

    @property
    def manifest(self) -> Manifest:
        """That of the whole."""
        return self.whole.manifest

    @property
    def class_names(self) -> tuple[str, ...]:
        """Those of the whole."""
        return self.whole.class_names

    @property
    def labels(self) -> np.ndarray:
        """Labels int64 `[m]`."""
        return self.whole.labels[self.indices]

    @property
    def skipped(self) -> Counter[str]:
        """Number of replaced samples by reason."""
        return self.whole.skipped

    @property
    def skipped_names(self) -> list[str]:
        """`shard:key: reason` of each replaced sample met so far."""
        return self.whole.skipped_names

    def order(self, seed: int) -> SampleOrder:
        """Return the order in which training sees the samples."""
        return SampleOrder(len(self), seed)


def few_of_each_class(dataset: ShardDataset, count: int, *, seed: int) -> TrainingSubset:
    """Return `count` samples of each class of a data set, drawn by `seed`.

    Raises:
        UserError: a class has fewer.
    """
    return TrainingSubset(dataset, draw_of_each_class(dataset.labels, count, seed=seed))


def draw_of_each_class(labels: np.ndarray, count: int, *, seed: int, draw: int = 0) -> np.ndarray:
    """Return indices of so many samples of each class, drawn without replacement.

    Args:
        labels: int64 `[b]`; -1 is no class.
        count: of each class that occurs.
        seed: of all draws.
        draw: which one, from 0.

    Returns:
        int64 `[classes · count]`.

    Raises:
        UserError: a class has fewer.
    """
    random = np.random.default_rng([seed, draw, count])
    chosen = []
    for label in np.unique(labels[labels >= 0]):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise UserError(
                f"class {label} has {len(places)} labelled training images, fewer than {count}"
            )
        chosen.append(random.choice(places, count, replace=False))
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)
