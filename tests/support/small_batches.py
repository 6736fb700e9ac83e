"""Batches of random images, and running layers with gradients."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megavis.data.loading.loader import Batch


def photographs(count, side, seed=1):
    """Return random images uint8 `[count, side, side, 3]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, side, side, 3), generator=generator, dtype=torch.uint8)


def batch_of(inputs, first=0):
    """Return unlabelled samples, numbered from `first`."""
    index = torch.arange(first, first + len(inputs))
    return Batch(inputs, torch.full((len(inputs),), -1), index)


def run_layers(layers, inputs):
    """Run layers with gradients, unlike `Inference`."""
    state = inputs
    for layer in layers:
        state = layer(state)
    return state


class HeldOutIds:
    """Images of random ids with labels, read as shards are."""

    directory = Path("held_out")

    def __init__(self, num_ids: int, num_tokens: int, labels: Sequence[int]) -> None:
        random, self.labels = np.random.default_rng(5), np.array(labels)
        self.ids = random.integers(num_ids, size=(len(labels), num_tokens))

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices, positions=None):
        return self.ids[indices], self.labels[indices]
