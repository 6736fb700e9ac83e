"""Which tokens of an image are hidden, where their number is the same for all images.

`tokens`: a random subset. `blocks`: random rectangles of the token grid, as in "BEiT: BERT
Pre-Training of Image Transformers" (Bao et al., 2021), algorithm 1. `grid`: three of each square of
2 × 2 tokens, as in "Masked Autoencoders Are Scalable Vision Learners", figure 6.

Legend: b images, n = H · W tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.grammar.boundaries import MaskShape
from megavis.parallel.random import uniform
from megavis.schedules.orders import random_orders

_MOST_BLOCKS = 32
_LEAST_SHARE = 16 / 196
"""A block has at least 16 of BEiT's 196 patches."""
_ASPECT = 0.3
"""The ratio of a block's sides is between this and its inverse."""


def random_ranks(index: Tensor, num_tokens: int, *, seed: int) -> Tensor:
    """Return the rank of each token in the random order in which samples `[b]` hide them."""
    # The inverse of a permutation.
    return random_orders(index, num_tokens, seed=seed, purpose="mask").argsort(dim=1)


@dataclass(frozen=True)
class HiddenTokens:
    """A number of hidden tokens, and their shape.

    Attributes:
        grid: rows and columns of tokens.
        count: hidden tokens of each image.
    """

    shape: MaskShape
    grid: tuple[int, int]
    count: int

    def with_count(self, count: int) -> HiddenTokens:
        """Return the same shape with another number; raises UserError for a grid."""
        if self.shape == "grid" and count != self.count:
            raise UserError("a mask of shape grid hides three quarters of the tokens")
        return replace(self, count=count)

    def ranks(self, index: Tensor, *, seed: int) -> Tensor:
        """Return when samples int64 `[b]` hide each token: int64 `[b, n]`, a permutation.

        Hidden are the tokens whose rank is below `count`.
        """
        if self.shape == "grid":
            return self._grid_ranks(index, seed=seed)
        ranks = random_ranks(index, math.prod(self.grid), seed=seed)
        if self.shape == "tokens":
            return ranks
        blocks = self._blocks(index, seed=seed)
        # Tokens of a block in raster order, which cuts the last block at a row; tokens of no block
        # in random order.
        places = torch.arange(ranks.shape[1], device=index.device)
        within = torch.where(blocks < _MOST_BLOCKS, places, ranks)
        return (blocks * ranks.shape[1] + within).argsort(dim=1).argsort(dim=1)

    def _grid_ranks(self, index: Tensor, *, seed: int) -> Tensor:
        """Hide all tokens but those at one place of each square, drawn for each image."""
        height, width = self.grid
        place = (4 * uniform(index, 1, seed=seed, purpose="grid-mask")).long()
        rows = torch.arange(height, device=index.device)[:, None] % 2
        columns = torch.arange(width, device=index.device) % 2
        is_shown = (2 * rows + columns).flatten() == place
        return is_shown.long().argsort(dim=1, stable=True).argsort(dim=1)

    def _blocks(self, index: Tensor, *, seed: int) -> Tensor:
        """Return the first block that covers each token, int64 `[b, n]`; `_MOST_BLOCKS` for none.

        A block has between a least number of tokens and those that are left to hide. There is a
        fixed number of blocks, the last ones without an effect, so that nothing is read back from
        the device.
        """
        height, width = self.grid
        draws = uniform(index, 4 * _MOST_BLOCKS, seed=seed, purpose="mask-blocks")
        # In float64, so that every device rounds to the same sides.
        sizes, aspects, tops, lefts = draws.double().view(len(index), _MOST_BLOCKS, 4).unbind(2)
        aspects = torch.exp(math.log(_ASPECT) * (1.0 - 2.0 * aspects))
        rows = torch.arange(height, device=index.device)
        columns = torch.arange(width, device=index.device)
        least = max(1, round(_LEAST_SHARE * height * width))
        first = torch.full((len(index), height, width), _MOST_BLOCKS, device=index.device)
        for block in range(_MOST_BLOCKS):
            left = self.count - (first < _MOST_BLOCKS).sum((1, 2))
            small = left.clamp(max=least)
            area = small + sizes[:, block] * (left - small)
            tall = (area * aspects[:, block]).sqrt().round().clamp(max=height).long()
            wide = (area / aspects[:, block]).sqrt().round().clamp(max=width).long()
            top = (tops[:, block] * (height - tall + 1)).long()
            start = (lefts[:, block] * (width - wide + 1)).long()
            in_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
            in_columns = (columns >= start[:, None]) & (columns < (start + wide)[:, None])
            covers = in_rows[:, :, None] & in_columns[:, None, :] & (left > 0)[:, None, None]
            first = torch.where(covers & (first == _MOST_BLOCKS), block, first)
        return first.flatten(1)
