"""Dropout on what is split over the tensor group."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.parallel.random import rank_local_rng


class SplitDropout(nn.Module):
    """Dropout on features of which each process of the tensor group holds others."""

    def __init__(self, probability: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.probability, self.group = probability, group

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of this process's part, in training alone."""
        if not self.training:
            return x
        with rank_local_rng(self.group.rank(), self.group.size()):
            return F.dropout(x, self.probability)
