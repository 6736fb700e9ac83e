"""Batch normalisation without gain and bias, for features of a frozen network.

"Masked Autoencoders Are Scalable Vision Learners", appendix A.2: "an extra BatchNorm layer without
affine transformation"; "Denoising Autoregressive Representation Learning", appendix B.1. The batch
is the whole step's, over all data-parallel processes, so the layout changes nothing.

Legend: b images of this process, h features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

_EPSILON = 1e-6
_MOMENTUM = 0.1
"""Share of the present batch in the running statistics."""


class BatchNorm(nn.Module):
    """Subtracts the mean and divides by the deviation of a batch, or of all batches so far.

    Nothing before it learns, so no gradient passes. `mean` and `variance` are the running
    statistics, with which evaluation works.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, num_features: int, processes: dist.ProcessGroup) -> None:
        super().__init__()
        self.processes = processes
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Standardise `[b, h]`; returns float32."""
        features = features.float()
        if not self.training:
            return (features - self.mean) / (self.variance + _EPSILON).sqrt()
        # Every process has as many images.
        total = len(features) * self.processes.size()
        mean = self._sum(features.sum(0)) / total
        squares = self._sum((features - mean).square().sum(0))
        self._remember("mean", mean)
        self._remember("variance", squares / max(1, total - 1))
        return (features - mean) / (squares / total + _EPSILON).sqrt()

    def _sum(self, value: Tensor) -> Tensor:
        """Add up over the processes, in place."""
        dist.all_reduce(value, group=self.processes)
        return value

    def _remember(self, name: str, value: Tensor) -> None:
        # In float32 from here on, whatever precision the engine has turned zeros and ones into.
        setattr(self, name, torch.lerp(getattr(self, name).float(), value, _MOMENTUM))
