"""Random batches in the form of a config's shards."""

from __future__ import annotations

import torch
from torch import Tensor

from megavis.composition.tokens import Vocabulary
from megavis.composition.trainable import Trainable
from megavis.data.loading.batch import Batch


def random_batch(objective: Trainable, count: int, *, seed: int = 0) -> Batch:
    """Return `count` samples of random numbers on the CPU, in the form of the config's shards."""
    blank = objective.backbone.blank_batch(count, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    inputs = _random_like(blank.inputs, objective, generator)
    return Batch(inputs, blank.labels, torch.arange(count))


def _random_like(blank: Tensor, objective: Trainable, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(blank.shape), blank.dtype
    if dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=dtype)
    if dtype == torch.int64:
        ids = objective.backbone.composition().reads
        assert isinstance(ids, Vocabulary)
        return torch.randint(ids.vocabulary_size, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator)
    if dtype == torch.float16:  # latents: means, then scales
        numbers[:, 1] = 0.1
    return numbers.to(dtype)
