"""Norms: RMS and layer norm of the blocks, and the batch norm of linear evaluation.

Legend: b images of this process, h features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megavis.model.kernels import layer_norm, rms_norm
from megavis.model.parameters import set_partial_gradient

# As in the linear probe of MAE's code: ε of 1e-6, and torch's default momentum.
_EPSILON, _MOMENTUM = 1e-6, 0.1
"""Of batch norm; momentum is the weight of the current batch in the running statistics."""


class Norm(nn.Module):
    """RMS norm (gain only) or layer norm over the last dimension, computed in float32.

    Under sequence parallelism each process of the tensor group normalises its own tokens, so the
    gradients of gain and bias are partial sums; `training/partial_gradients.py` adds them up.
    """

    may_have_bias: ClassVar[bool] = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.subtracts_mean = config.normalization == "LayerNorm"
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = None
        if self.subtracts_mean and self.may_have_bias:
            self.bias = nn.Parameter(torch.zeros(hidden_size))
        if self.is_split(config):
            set_partial_gradient(self.parameters())

    def start_on(self, device: torch.device) -> None:
        """Give parameters that were built on the meta device their initial values on another."""
        for name, parameter in list(self.named_parameters()):
            value = torch.full_like(parameter, name == "weight", device=device)
            started = nn.Parameter(value, parameter.requires_grad)
            # How it is trained is declared by attributes.
            vars(started).update(vars(parameter))
            setattr(self, name, started)

    @staticmethod
    def is_split(config: TransformerConfig) -> bool:
        """Return whether a process normalises only its own tokens."""
        return config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[..., hidden_size]`; the result has the input's dtype."""
        if self.subtracts_mean:
            return layer_norm(hidden, self.weight, self.bias, self.eps)
        return rms_norm(hidden, self.weight, self.eps)


class GainNorm(Norm):
    """A `Norm` without bias."""

    may_have_bias = False


class BatchNorm(nn.Module):
    """Batch norm without affine transformation, for features of a frozen network.

    "Masked Autoencoders Are Scalable Vision Learners", appendix A.2: "an extra BatchNorm layer
    without affine transformation"; "Denoising Autoregressive Representation Learning", appendix
    B.1. Statistics are over the batch of all data-parallel processes, so they do not depend on the
    layout. Since the network is frozen, no gradient is computed. `mean` and `variance` are the
    running statistics, used in evaluation.
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
        """Normalise `[b, h]`; return float32."""
        features = features.float()
        if not self.training:
            return (features - self.mean) / (self.variance + _EPSILON).sqrt()
        # Every process has the same number of images.
        total = len(features) * self.processes.size()
        mean = self._sum(features.sum(0)) / total
        # A second pass, since E[x²] - E[x]² cancels where a feature's mean is large.
        squares = self._sum((features - mean).square().sum(0))
        self._remember("mean", mean)
        # As in torch: the running variance is unbiased, the batch's normalizing variance is not.
        self._remember("variance", squares / max(1, total - 1))
        return (features - mean) / (squares / total + _EPSILON).sqrt()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm:
        # Casting the network would round the statistics, which stay float32 in checkpoints too.
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, value in list(self.named_buffers()):
            if value.dtype != torch.float32:
                setattr(self, name, before[name].to(value.device))
        return self

    def _sum(self, value: Tensor) -> Tensor:
        """All-reduce in place."""
        dist.all_reduce(value, group=self.processes)
        return value

    def _remember(self, name: str, value: Tensor) -> None:
        setattr(self, name, torch.lerp(getattr(self, name), value, _MOMENTUM))
