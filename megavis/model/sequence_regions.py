"""Differentiable collectives of sequence parallelism, made of torch's public ones.

The compiler can trace them into the graph of a block; Megatron's query CUDA's current device, which
breaks the graph. Each process holds s / p consecutive tokens.

Legend: p processes of the group, s tokens, b images, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def gather(own: Tensor, group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    """Return the tokens of all processes, `[s, b, h]` of `[s / p, b, h]`.

    The backward pass selects this process's tokens of the gradient; with `sums`, after the
    gradients of all processes have been added.
    """
    whole: Tensor = _Gather.apply(own, group, sums)
    return whole


def scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this process's tokens, `[s / p, b, h]` of `[s, b, h]`; p must divide s."""
    own: Tensor = _Scatter.apply(whole, group)
    return own


def sum_and_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add the tensors `[s, b, h]` of all processes, and return this process's tokens."""
    own: Tensor = _SumAndScatter.apply(parts, group)
    return own


def gathered_linear(
    own: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """Return a linear map of all tokens, saving only this process's for the backward pass."""
    result: Tensor = _GatheredLinear.apply(own, weight, bias, group)
    return result


def all_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all processes, without gradient."""
    whole = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
    return whole


def own_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this process's rows, without gradient."""
    # A view would keep all rows alive until the backward pass.
    return whole.tensor_split(group.size())[group.rank()].clone()


def summed_rows(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this process's rows of the sum over processes, without gradient."""
    own = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts.contiguous(), group=group)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        return all_rows(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        select = summed_rows if ctx.sums else own_rows
        return select(gradient, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_rows(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_rows(gradient, ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed_rows(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_rows(gradient, ctx.group), None


class _GatheredLinear(torch.autograd.Function):
    """Gathers the tokens again in the backward pass, as Megatron's layer does."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        return F.linear(all_rows(own, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own, weight = ctx.saved_tensors
        # Concatenate nothing from the gradient, so that the compiler does not recognize the earlier
        # gather of the same tokens and save its result.
        again = torch.cat([own.flatten(), gradient.flatten()[:0]]).view_as(own)
        rows = gradient.flatten(0, 1)
        of_weight = rows.t() @ all_rows(again, ctx.group).flatten(0, 1)
        of_own = summed_rows(gradient @ weight, ctx.group)
        return of_own, of_weight, rows.sum(0) if ctx.has_bias else None, None
