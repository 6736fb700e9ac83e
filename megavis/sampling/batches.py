"""Batches of images, distributed over the processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megavis.parallel.context import Axis
from megavis.parallel.progress_bar import shown


def distribute_batches(
    draw: Callable[[Tensor], Tensor], num_images: int, *, batch_size: int, data: Axis
) -> Tensor:
    """Generate images in batches, distributed over the data-parallel processes.

    `draw` generates the images with the given indices, int64 `[b]`, which may exceed `num_images`.

    Returns:
        All images in the order of their indices, the same on every process.
    """
    # All processes generate the same number of images, padded if necessary: under ZeRO-3 each
    # forward pass gathers weights, which is collective.
    share = -(-num_images // data.size)
    numbers = torch.arange(data.rank * share, (data.rank + 1) * share)
    chunks = numbers.split(batch_size)
    # What training draws is one batch.
    bar = shown(chunks, "generating", total=share, size=len) if len(chunks) > 1 else chunks
    parts = [draw(chunk) for chunk in bar]
    return _gather(torch.cat(parts), data)[:num_images]


def _gather(mine: Tensor, data: Axis) -> Tensor:
    """Concatenate `[b, ...]` of all data-parallel processes by rank."""
    if data.size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(data.size)]
    dist.all_gather(parts, mine.contiguous(), group=data.group)
    return torch.cat(parts)
