"""Vectors to ids of a learned codebook, by the nearest entry.

Legend: b images, h and w of the grid of ids, d numbers of a codebook entry, K entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Quantized:
    """A grid of vectors, quantized.

    Attributes:
        codes: nearest entries `[b, d, h, w]`, whose gradient goes to the codebook.
        ids: their numbers, int64 `[b, h, w]`.
    """

    codes: Tensor
    ids: Tensor


class Codebook(nn.Module):
    """K vectors; each input vector becomes the nearest one."""

    def __init__(self, size: int, code_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, code_size)
        nn.init.uniform_(self.embedding.weight, -1.0 / size, 1.0 / size)

    def forward(self, vectors: Tensor) -> Quantized:
        """Map `[b, d, h, w]` to the nearest entries by squared distance, in float32."""
        entries = self.embedding.weight.float()
        flat = vectors.detach().float().permute(0, 2, 3, 1).flatten(0, 2)
        # |v|² is the same for all entries.
        distances = entries.square().sum(1) - 2.0 * flat @ entries.detach().t()
        ids = distances.argmin(1).unflatten(0, (len(vectors), *vectors.shape[2:]))
        return Quantized(self.codes(ids), ids)

    def codes(self, ids: Tensor) -> Tensor:
        """Return the entries `[b, d, h, w]` of ids `[b, h, w]`."""
        return self.embedding(ids).permute(0, 3, 1, 2)


def usage(ids: Tensor, size: int) -> Tensor:
    """Return how often each of `size` entries is among the ids: float32 `[size]`."""
    flat = ids.flatten()
    counts = torch.zeros(size, device=ids.device)
    # Without a look at the largest id, which would wait for the device.
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
