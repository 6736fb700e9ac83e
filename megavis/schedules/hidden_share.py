"""The number of hidden tokens of an image, where it is drawn for each image.

Legend: b images, n tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.parallel.random import uniform


@dataclass(frozen=True)
class HiddenShare:
    """A distribution of the share of an image's tokens that are hidden, at most 1.

    The share is cos(π/2 · u) with u uniform in [0, 1 - `least`) ("MaskGIT", section 3.1). With a
    `deviation` it is normal around 1, cut to [`least`, 1] ("Autoregressive Image Generation without
    Vector Quantization", section 4.2: a deviation of 0.25 and at least 0.7).

    Attributes:
        num_tokens: tokens of an image, n.
        least: below 1.
        fewest: tokens that are hidden in every image, 1 or more.
    """

    num_tokens: int
    least: float
    deviation: float | None
    fewest: int

    def drawn(self, index: Tensor, *, seed: int) -> Tensor:
        """Draw the number of hidden tokens of samples int64 `[b]`: float32 `[b]`."""
        return self.count(uniform(index, 1, seed=seed, purpose="masked-share")[:, 0])

    def count(self, draws: Tensor) -> Tensor:
        """Return the hidden tokens, float32 `[b]` in 1..n, for uniform draws in [0, 1) `[b]`."""
        if self.deviation is None:
            share = torch.cos(math.pi / 2 * (1.0 - self.least) * draws)
        else:
            below = self._below(self.least)
            # In float64, so that every device rounds up to the same number.
            quantile = torch.special.ndtri(below + (0.5 - below) * draws.double())
            share = (1.0 + self.deviation * quantile).float()
        # Round up, so that some token is always hidden, and never hide fewer tokens than the rows
        # of a model require.
        return (share * self.num_tokens).ceil().clamp(min=self.fewest)

    @property
    def mean(self) -> float:
        """The expectation of the number."""
        # E[c] is the sum over k of P(c > k).
        return sum(self._exceeds(k / self.num_tokens) for k in range(self.num_tokens))

    def _exceeds(self, share: float) -> float:
        """Return the probability of a larger share."""
        if self.deviation is None:
            # The range of u, of all of [0, 1 - least), in which cos(π/2 · u) is larger.
            return min(1.0, 2 / math.pi * math.acos(share) / (1.0 - self.least))
        if share < self.least:
            return 1.0
        return (0.5 - self._below(share)) / (0.5 - self._below(self.least))

    def _below(self, share: float) -> float:
        """Return the probability of a smaller share before it is cut."""
        assert self.deviation is not None
        return (1.0 + math.erf((share - 1.0) / self.deviation / math.sqrt(2))) / 2
