"""Order and groups of each image, as a GVP config draws or names them (section 3.2, appendix B).

Legend: b images, T tokens of an image, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import Constant, random_orders
from megavis.objectives import gvp_segmentation as segmentation
from megavis.objectives.gvp_boundaries import fault_of_boundaries
from megavis.objectives.gvp_config import GVPConfig
from megavis.schedules.base import Arrangement
from megavis.schedules.groups import Groups


class Grouping(Groups):
    """z, and the group of each of its places."""

    def __init__(
        self, paper: GVPConfig, *, num_tokens: int, bounds: tuple[int, int], seed: int
    ) -> None:
        """Build.

        Args:
            paper: says how orders are drawn and groups are cut.
            num_tokens: T.
            bounds: the first place that is predicted and the last that is read, in any image.
            seed: decides the draws, together with the sample.
        """
        self.paper, self.num_tokens, self.bounds, self.seed = paper, num_tokens, bounds, seed

    @property
    def num_positions(self) -> int:
        """Places T of z."""
        return self.num_tokens

    @property
    def is_random(self) -> bool:
        """True where order or groups are drawn."""
        return self.paper.order == "random" or self.paper.segmentation in ("random", "mixed")

    def draw(self, index: Tensor) -> Arrangement:
        """Return orders and groups of samples int64 `[b]`."""
        if self.paper.order == "random":
            order = random_orders(index, self.num_tokens, seed=self.seed)
        else:
            order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, self._boundaries(index))

    def _arranged(self, order: Tensor, boundaries: Tensor) -> Arrangement:
        first, last = self.bounds
        groups = segmentation.groups_of(boundaries, self.num_tokens)
        return Arrangement(order, groups, num_content=last, first_asked=first)

    def chosen(
        self, sample_index: Tensor, order: Tensor | None, boundaries: Sequence[int] | None
    ) -> Arrangement:
        """Return a user's order `[b, T]` and groups; what is absent is drawn.

        Args:
            sample_index: int64 `[b]`.
            order: int64 `[b, T]`.
            boundaries: n_0 .. n_{K-1}, for all images alike.

        Raises:
            UserError: the order is no permutation, or the boundaries do not increase.
        """
        drawn = self.draw(sample_index)
        if order is None:
            order = drawn.order
        else:
            segmentation.check_order(order, self.num_tokens)
        if boundaries is None:
            return replace(drawn, order=order)
        fault = fault_of_boundaries(boundaries, self.num_tokens)
        if fault:
            raise UserError(f"boundaries {fault}")
        ends = torch.as_tensor(boundaries, device=order.device).expand(len(order), -1)
        return self._arranged(order, ends)

    def for_features(self, index: Tensor) -> Arrangement:
        """Return raster order and typical groups of training, without a draw."""
        paper, device, num_images = self.paper, index.device, len(index)
        if paper.segmentation == "given":
            boundaries = self._given.on(device)
        else:
            boundaries = segmentation.typical_boundaries(
                paper.segmentation, self.num_tokens, paper.num_groups, device=device
            )
        order = torch.arange(self.num_tokens, device=device).expand(num_images, -1)
        return self._arranged(order, boundaries.expand(num_images, -1))

    def _boundaries(self, sample_index: Tensor) -> Tensor:
        """Return n_0 .. n_{K-1} of samples `[b]`: int64 `[b, K]`."""
        paper = self.paper
        if paper.segmentation == "given":
            return self._given.on(sample_index.device).expand(len(sample_index), -1)
        return segmentation.draw_boundaries(
            paper.segmentation,
            sample_index,
            num_tokens=self.num_tokens,
            num_groups=paper.num_groups,
            seed=self.seed,
        )

    @cached_property
    def _given(self) -> Constant:
        return Constant(torch.tensor(self.paper.boundaries))
