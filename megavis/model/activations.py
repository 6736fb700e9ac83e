"""Activation functions of the papers' MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.model.kernels import is_fused, region

QUICK_GELU_FACTOR = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x), the approximation of GELU that iGPT uses."""
    if is_fused(x):
        return _quick_gelu(x)
    result: Tensor = _QuickGelu.apply(x)
    return result


@region
def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(QUICK_GELU_FACTOR * x)


class _QuickGelu(torch.autograd.Function):
    """Quick GELU as SiLU of 1.702 x, whose derivative is one kernel; saves memory over autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(QUICK_GELU_FACTOR * x, inplace=True).mul_(1.0 / QUICK_GELU_FACTOR)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient, QUICK_GELU_FACTOR * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}
"""Activations by their names in `model.activation`."""
