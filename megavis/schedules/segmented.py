"""Order and groups of each image, drawn or named.

Legend: b images, T tokens of an image, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import Constant, random_orders
from megavis.schedules import segmentation
from megavis.schedules.base import Arrangement
from megavis.schedules.boundaries import Cut, bounds_of, fault_of_boundaries
from megavis.schedules.groups import Groups
from megavis.schedules.orders import check_order


class Grouping(Groups):
    """z, and the group of each of its places."""

    names = ("order", "boundaries")

    def __init__(
        self,
        cut: Cut,
        *,
        num_tokens: int,
        num_groups: int,
        boundaries: Sequence[int] | None = None,
        shuffled: bool,
        seed: int,
    ) -> None:
        """Build.

        Args:
            cut: how groups are cut.
            num_tokens: T.
            num_groups: K; of no meaning where boundaries are given.
            boundaries: n_0 .. n_{K-1}, where they are given.
            shuffled: each image has an order of its own, in place of raster order.
            seed: decides the draws, together with the sample.
        """
        self.cut, self.num_tokens, self.num_groups = cut, num_tokens, num_groups
        self.shuffled, self.seed = shuffled, seed
        self.bounds = bounds_of(cut, num_tokens, num_groups, boundaries)
        self._given = None if boundaries is None else Constant(torch.tensor(boundaries))

    @property
    def num_positions(self) -> int:
        """Places T of z."""
        return self.num_tokens

    @property
    def is_random(self) -> bool:
        """True where order or groups are drawn."""
        return self.shuffled or self.cut in ("random", "mixed")

    def draw(self, index: Tensor) -> Arrangement:
        """Return orders and groups of samples int64 `[b]`."""
        if self.shuffled:
            order = random_orders(index, self.num_tokens, seed=self.seed)
        else:
            order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, self._boundaries(index))

    def _arranged(self, order: Tensor, boundaries: Tensor) -> Arrangement:
        first, last = self.bounds
        groups = segmentation.groups_of(boundaries, self.num_tokens)
        return Arrangement(order, groups, num_content=last, first_asked=first)

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return a user's order and groups; what is absent is drawn.

        All tokens are content, and all are asked for: where the groups lie follows from the data.

        Args:
            index: int64 `[b]`.
            choices: `order`, int64 `[b or 1, T]`; `boundaries`, n_0 .. n_{K-1}, of all images.
            is_named: of no meaning here.

        Raises:
            UserError: the order is no permutation, or the boundaries do not increase.
        """
        plan, order = self.draw(index), choices.get("order")
        boundaries: Sequence[int] | None = choices.get("boundaries")
        if order is not None:
            check_order(order, self.num_tokens)
            plan = replace(plan, order=order.to(index.device).expand(len(index), -1))
        if boundaries is not None:
            fault = fault_of_boundaries(boundaries, self.num_tokens)
            if fault:
                raise UserError(f"boundaries {fault}")
            ends = torch.as_tensor(boundaries, device=index.device).expand(len(index), -1)
            plan = self._arranged(plan.order, ends)
        return replace(plan, num_content=self.num_tokens, first_asked=0)

    def for_features(self, index: Tensor) -> Arrangement:
        """Return raster order and typical groups of training, without a draw."""
        if self.cut == "given":
            boundaries = self._boundaries(index)
        else:
            boundaries = segmentation.typical_boundaries(
                self.cut, self.num_tokens, self.num_groups, device=index.device
            ).expand(len(index), -1)
        order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, boundaries)

    def _boundaries(self, index: Tensor) -> Tensor:
        """Return n_0 .. n_{K-1} of samples `[b]`: int64 `[b, K]`."""
        if self.cut == "given":
            assert self._given is not None
            return self._given.on(index.device).expand(len(index), -1)
        return segmentation.draw_boundaries(
            self.cut,
            index,
            num_tokens=self.num_tokens,
            num_groups=self.num_groups,
            seed=self.seed,
        )
