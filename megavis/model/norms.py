"""Norms that keep their gradients right under sequence parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / √(mean x² + eps) · gain over the last dimension of float32 `x`.

    "Root Mean Square Layer Normalization", equation 4.
    """
    if x.is_cuda:
        return F.rms_norm(x, gain.shape, gain, eps)
    result: Tensor = _RMSNorm.apply(x, gain, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    """The same where torch has no kernel: on a CPU autograd takes six times as long.

    It keeps what the kernel for CUDA keeps.

    With n = x / √(mean x² + eps) and g the gradient times the gain, x has the gradient
    (g - n · mean(g · n)) / √(mean x² + eps).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, inverse)
        return (x * inverse).mul_(gain)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, inverse = ctx.saved_tensors
        normalised = x * inverse
        of_gain = (gradient * normalised).flatten(0, -2).sum(0)
        scaled = gradient * gain
        along = torch.linalg.vecdot(scaled, normalised).unsqueeze(-1).div_(x.shape[-1])
        of_x = scaled.sub_(normalised.mul_(along)).mul_(inverse)
        return of_x, of_gain, None


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
        wide = hidden.float()
        if self.subtracts_mean:
            shift = None if bias is None else bias.float()
            out = F.layer_norm(wide, weight.shape, weight.float(), shift, self.eps)
        else:
            out = rms_norm(wide, weight.float(), self.eps)
        return out.to(hidden.dtype)


class GainNorm(Norm):
    """The same without a bias."""

    may_have_bias = False
