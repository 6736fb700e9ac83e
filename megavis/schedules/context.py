"""A random share of the tokens is the context, which all read; all are predicted, or the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.boundaries import context_size
from megavis.schedules.schedule import Arrangement, Schedule


class Context(Schedule):
    """The first positions of a random order are read; all are asked for, or those after them."""

    def __init__(
        self,
        num_positions: int,
        *,
        mask_ratio: float,
        placed_ratio: float = 0.0,
        asks_context: bool = True,
        seed: int,
    ) -> None:
        """Build.

        Args:
            num_positions: n.
            mask_ratio: η in [0, 1), the share that is hidden.
            placed_ratio: share of the tokens, the first of the context, that show their place.
            asks_context: tokens of the context are asked for, too.
            seed: of the run, which with the sample decides the order.
        """
        self.asks_context = asks_context
        self.num_positions, self.mask_ratio, self.seed = num_positions, mask_ratio, seed
        self.num_placed = round(placed_ratio * num_positions)

    @property
    def is_random(self) -> bool:
        """True where some tokens are drawn to be read, or to show their place."""
        return self.num_context(self.mask_ratio) < self.num_positions or self.num_placed > 0

    def num_context(self, mask_ratio: float) -> int:
        """Return how many tokens are read: 1 - η of them, and at least one."""
        return context_size(self.num_positions, mask_ratio)

    def draw(self, index: Tensor, mask_ratio: float | None = None) -> Arrangement:
        """Draw the context of samples `[b]`; η is that of training unless another is named."""
        draws = uniform(index, self.num_positions, seed=self.seed, purpose="context")
        # Stable: equal draws, one in 2^24, fall alike on every device.
        order = draws.argsort(dim=1, stable=True)
        ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        return self._arranged(order, self.num_context(ratio), self.num_placed)

    @property
    def names(self) -> tuple[str, ...]:
        """The hidden share, unless it decides how many are asked for."""
        return ("mask_ratio",) if self.asks_context else ()

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Draw the context with η `mask_ratio`, that of training when absent.

        All read all where neither samples nor η are named.
        """
        ratio: float | None = choices.get("mask_ratio")
        if ratio is None and not is_named:
            return self.for_features(index)
        if ratio is not None and not 0 <= ratio <= 1:
            raise UserError(f"the mask_ratio must lie in 0..1, not {ratio}")
        return self.draw(index, ratio)

    def for_features(self, index: Tensor) -> Arrangement:
        """Let all read all, and every token show its place."""
        order = torch.arange(self.num_positions, device=index.device).expand(len(index), -1)
        return self._arranged(order, self.num_positions, self.num_positions)

    def _arranged(self, order: Tensor, num_context: int, num_placed: int) -> Arrangement:
        positions = torch.arange(self.num_positions, device=order.device)
        asked = (positions >= num_placed).long()[None]
        return Arrangement(
            order,
            asked,
            num_content=num_context,
            first_asked=0 if self.asks_context else num_context,
            num_placed=num_placed,
            predicts_all=num_placed == 0,
        )
