"""All tokens predicted at once, each from all that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from megavis.schedules.base import Arrangement, Schedule
from megavis.schedules.orders import Orders


class AllAtOnce(Schedule):
    """One group: what a token may read of itself is the paper's own matter."""

    def __init__(self, num_positions: int) -> None:
        """Build for `num_positions` tokens in raster order."""
        self.orders = Orders(torch.arange(num_positions))

    def draw(self, index: Tensor) -> Arrangement:
        """Ask for all tokens."""
        order = self.orders.shared(index.device)
        groups = torch.ones_like(order)
        return Arrangement(order, groups, num_content=order.shape[1], predicts_all=True)

    def for_features(self, index: Tensor) -> Arrangement:
        """Ask for all tokens."""
        return self.draw(index)
