"""Batches of random images, and running layers with gradients."""

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
