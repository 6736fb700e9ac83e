"""Activation functions of the papers' MLPs, and their recomputation in the backward pass.

Norms and activation functions are recomputed, never matrix products. Megatron-Core's
`recompute_modules`, whose implementation needs CUDA, does the same. The output of such a function
takes as much memory as its input, and is kept only because the matrix product that reads it needs
it for the gradient of its weight.

"Reducing Activation Recomputation in Large Transformer Models", section 5, recomputes operations
that take much memory and few FLOPs, there attention scores. Today's kernels do not store those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.model.kernels import is_fused, region

QUICK_GELU_FACTOR = 1.702


Branch = tuple[Tensor, Tensor | None]
"""Output of a branch of a block or of a matrix product, and a bias that the caller adds."""


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x), the approximation of GELU that iGPT uses."""
    if is_fused(x):
        return _quick_gelu(x)
    return _QuickGelu.apply(x)


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
        # Only SiLU's derivative: the inner derivative, 1.702, cancels the factor 1 / 1.702.
        return torch.ops.aten.silu_backward(gradient, QUICK_GELU_FACTOR * x)


@region
def swiglu(x: Tensor) -> Tensor:
    """Return SiLU(gate) · value for pairs of a gate and a value, `[..., 2 n]` to `[..., n]`.

    "GLU Variants Improve Transformer", equation 6. Gates and values alternate, so that any part of
    a tensor group has both of its own.
    """
    gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": swiglu,
}
"""Activations by their names in `model.activation`."""


def with_recomputed(
    function: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Branch]
) -> Branch:
    """Return `use(function(x))`, saving only `x` and recomputing `function` in the backward pass.

    Args:
        function: must not draw random numbers. Its parameters accumulate their gradients.
        use: must not need its argument after it returns, except for gradients. The gradient of its
            first result starts the recomputation.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return use(function(x))
    middle = _RecomputedOutput.apply(function, x)
    used = use(middle)
    _free(middle, until=used[0])
    return used


class _RecomputedOutput(torch.autograd.Function):
    """A function that saves only its input; `_free` adds what the backward pass needs."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x, again = ctx.repeated
        ctx.repeated = None
        # Not `autograd.grad`: gains of a norm accumulate their gradients here, which runs ZeRO's
        # hooks on them.
        torch.autograd.backward(again, gradient)
        return None, x.grad


def _free(middle: Tensor, *, until: Tensor) -> None:
    """Free the memory of a `_RecomputedOutput` until the gradient of another tensor arrives."""
    node: Any = middle.grad_fn
    storage = middle.untyped_storage()
    size = storage.nbytes()

    def restore(_: Tensor) -> None:
        (saved,) = node.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            again = node.function(x)
        node.repeated = x, again
        # Refill the storage: autograd would notice if the tensor itself were modified.
        storage.resize_(size)
        storage.copy_(again.untyped_storage())

    # `use` has saved this tensor for its own backward pass. Its storage is freed here, and refilled
    # by the hook before that pass reads it.
    storage.resize_(0)
    until.register_hook(restore)
