"""Random masking: a random subset of fixed size, the context, predicts the other tokens, or all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.boundaries import context_size
from megavis.schedules.schedule import Arrangement, Schedule


class RandomMasking(Schedule):
    """The first positions of a random order are the context; predict the others, or all tokens."""

    def __init__(
        self,
        num_positions: int,
        *,
        mask_ratio: float,
        placed_ratio: float = 0.0,
        asks_context: bool = True,
        seed: int,
    ) -> None:
        """Set up.

        Args:
            num_positions: n.
            mask_ratio: η in [0, 1), the share of the tokens outside the context.
            placed_ratio: share of the tokens, at the start of the context, that get their position.
            asks_context: predict the tokens of the context too.
            seed: the run's seed; the order is a function of seed and sample.
        """
        self.asks_context = asks_context
        self.num_positions, self.mask_ratio, self.seed = num_positions, mask_ratio, seed
        self.num_placed = round(placed_ratio * num_positions)

    @property
    def is_random(self) -> bool:
        """True if the context, or the tokens that get their position, are drawn."""
        return self.num_context(self.mask_ratio) < self.num_positions or self.num_placed > 0

    def num_context(self, mask_ratio: float) -> int:
        """Return the number of context tokens: a share of 1 - η, and at least one."""
        return context_size(self.num_positions, mask_ratio)

    def draw(self, index: Tensor, mask_ratio: float | None = None) -> Arrangement:
        """Draw the context of samples `[b]`; η defaults to its value in training."""
        draws = uniform(index, self.num_positions, seed=self.seed, purpose="context")
        # A stable sort breaks ties (one in 2^24) the same way on every device.
        order = draws.argsort(dim=1, stable=True)
        ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        return self._arranged(order, self.num_context(ratio), self.num_placed)

    @property
    def names(self) -> tuple[str, ...]:
        """The mask ratio, unless it determines the number of predicted tokens."""
        return ("mask_ratio",) if self.asks_context else ()

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Draw the context with η = `mask_ratio`, by default its value in training.

        If neither samples nor η are given, all tokens are context, as for features.
        """
        ratio: float | None = choices.get("mask_ratio")
        if ratio is None and not is_named:
            return self.for_features(index)
        if ratio is not None and not 0 <= ratio <= 1:
            raise UserError(f"mask_ratio must be in [0, 1], not {ratio}")
        return self.draw(index, ratio)

    def for_features(self, index: Tensor) -> Arrangement:
        """Make all tokens context, each with its position."""
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
