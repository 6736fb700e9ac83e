"""Norms that keep their gradients right under sequence parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megavis.model.kernels import layer_norm, rms_norm


class Norm(nn.Module):
    """RMS norm (gain only) or layer norm over the last dimension, computed in float32.

    Under sequence parallelism each process of the tensor group normalises its own tokens, so the
    gradient of gain and bias is a partial sum. DeepSpeed has no step that adds them up: the
    parameters pass through Megatron's copy region, whose backward does.
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
        self.sums_gradients = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[..., hidden_size]`; the result has the input's dtype."""
        weight, bias = self.weight, self.bias
        if self.sums_gradients:
            weight = copy_to_tensor_model_parallel_region(weight)
            bias = copy_to_tensor_model_parallel_region(bias) if bias is not None else None
        if self.subtracts_mean:
            return layer_norm(hidden, weight, bias, self.eps)
        return rms_norm(hidden, weight, self.eps)


class GainNorm(Norm):
    """The same without a bias."""

    may_have_bias = False
