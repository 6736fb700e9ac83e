"""Outputs of a pipeline stage in a form whose backward pass runs once.

DeepSpeed calls `backward` on each floating-point tensor that a stage has sent, so any common
part, such as an encoder whose memory is carried, would run once for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megavis.model.layer_state import PackedState


def with_one_backward(outputs: PackedState) -> PackedState:
    """Return the same tensors, such that only the last float runs the stage's backward pass.

    The other floats become leaves, which keep their gradients until then: it must be called last.
    """
    floats = [] if isinstance(outputs, Tensor) else [t for t in outputs if t.is_floating_point()]
    if len(floats) < 2 or not torch.is_grad_enabled():
        return outputs
    leaves = [tensor.detach().requires_grad_() for tensor in floats[:-1]]
    sent = iter((*leaves, _Last.apply(leaves, *floats)))
    return tuple(next(sent) if tensor.is_floating_point() else tensor for tensor in outputs)


class _Last(torch.autograd.Function):
    """The last of several tensors; its backward pass includes those of the others."""

    @staticmethod
    def forward(ctx: Any, leaves: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        return tensors[-1].view_as(tensors[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *(leaf.grad for leaf in ctx.leaves), gradient
