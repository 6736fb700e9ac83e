"""Order and groups of each image, as a GVP config draws or names them (section 3.2, appendix B).

Legend: b images, T tokens of an image, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import Constant, random_orders
from megavis.objectives import gvp_segmentation as segmentation
from megavis.objectives.gvp_boundaries import fault_of_boundaries
from megavis.objectives.gvp_config import GVPConfig
from megavis.objectives.gvp_layers import raster


class Grouping:
    """z, and the group of each of its places."""

    def __init__(self, paper: GVPConfig, *, num_tokens: int, seed: int) -> None:
        """Build.

        Args:
            paper: says how orders are drawn and groups are cut.
            num_tokens: T.
            seed: decides the draws, together with the sample.
        """
        self.paper, self.num_tokens, self.seed = paper, num_tokens, seed

    def draw(self, sample_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return orders and groups of samples int64 `[b]`: int64 `[b, T]` both."""
        if self.paper.order == "random":
            order = random_orders(sample_index, self.num_tokens, seed=self.seed)
        else:
            order = raster(sample_index, self.num_tokens)
        return order, segmentation.groups_of(self._boundaries(sample_index), self.num_tokens)

    def chosen(
        self, sample_index: Tensor, order: Tensor | None, boundaries: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return a user's order `[b, T]` and groups; what is absent is drawn.

        Args:
            sample_index: int64 `[b]`.
            order: int64 `[b, T]`.
            boundaries: n_0 .. n_{K-1}, for all images alike.

        Raises:
            UserError: the order is no permutation, or the boundaries do not increase.
        """
        drawn, groups = self.draw(sample_index)
        if order is None:
            order = drawn
        else:
            segmentation.check_order(order, self.num_tokens)
        if boundaries is None:
            return order, groups
        fault = fault_of_boundaries(boundaries, self.num_tokens)
        if fault:
            raise UserError(f"boundaries {fault}")
        ends = torch.as_tensor(boundaries, device=order.device).expand(len(order), -1)
        return order, segmentation.groups_of(ends, self.num_tokens)

    def typical(self, order: Tensor) -> Tensor:
        """Return groups int64 `[b, T]` without a draw, for the features of orders `[b, T]`."""
        paper = self.paper
        if paper.segmentation == "given":
            boundaries = self._given.on(order.device)
        else:
            boundaries = segmentation.typical_boundaries(
                paper.segmentation, self.num_tokens, paper.num_groups, device=order.device
            )
        return segmentation.groups_of(boundaries.expand(len(order), -1), self.num_tokens)

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
