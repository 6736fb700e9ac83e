"""Context parallelism: the processes of a context group share the tokens of the same images.

Between the first layer and the head each process holds consecutive tokens, s / p of them. Attention
trades tokens for heads with an all-to-all and back, so that each process attends from all tokens to
all, with 1 / p of the heads: "DeepSpeed Ulysses: System Optimizations for Enabling Training of
Extreme Long Sequence Transformer Models", section 3.1. Visibility and kernels stay the same.

Gradients are averaged over the context group as over the data-parallel group, while a loss is the
sum of its tokens' contributions. Gradients of split tensors are therefore p times those of one
process: `all_tokens` multiplies by p in the backward pass, and `own_tokens` divides by p. Layers
that see all tokens have the gradients of one process.

Legend: p processes of the context group, s tokens, b images, h hidden size, n heads, d numbers per
head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megavis.model.sequence_regions import all_rows, own_rows
from megavis.model.tensor_parallel import are_whole, gather_tokens, scatter_tokens


def splits_context(config: TransformerConfig) -> bool:
    """Return whether tokens are split over the context group in this forward pass."""
    return config.context_parallel_size > 1 and not are_whole()


def all_tokens(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Gather the tokens of `[s, b, h]` that are split over the tensor or the context group.

    Gradients of the result must be equal on all processes, as they are for layers that begin with
    Megatron's copy region; the backward pass selects this process's tokens.
    """
    return gather_context(gather_tokens(hidden, config, groups.tp), config, groups)


def gather_context(
    hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection
) -> Tensor:
    """Gather tokens over the context group only; for gradients see `all_tokens`."""
    gathered: Tensor = _Gather.apply(hidden, groups.cp) if splits_context(config) else hidden
    return gathered


def own_tokens(hidden: Tensor, config: TransformerConfig, groups: ProcessGroupCollection) -> Tensor:
    """Return this process's tokens of `[s, b, h]`; s must be divisible by both groups' sizes."""
    if splits_context(config):
        hidden = _Scatter.apply(hidden, groups.cp)
    return scatter_tokens(hidden, config, groups.tp)


def seen_by_parts(
    whole: Tensor, config: TransformerConfig, groups: ProcessGroupCollection
) -> Tensor:
    """Return a tensor that each process's own tokens attend to, such as an encoder's output.

    The backward pass averages the gradients of the context group.
    """
    averaged: Tensor = _Average.apply(whole, groups.cp) if splits_context(config) else whole
    return averaged


def tokens_to_heads(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Trade own tokens of all heads, `[s / p, b, n · d]`, for all tokens of some heads.

    Returns:
        `[s, b, n / p · d]`.
    """
    # An all-to-all cuts the first dimension, so parts for each process come first.
    by_process = tokens.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3).contiguous()
    received: Tensor = all_to_all(group, by_process)
    return received.flatten(0, 1)


def heads_to_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert `tokens_to_heads`: `[s, b, n / p · d]` to `[s / p, b, n · d]`."""
    received: Tensor = all_to_all(group, heads.unflatten(0, (group.size(), -1)))
    return received.permute(1, 2, 0, 3).flatten(2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_rows(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_rows(gradient, ctx.group) * ctx.group.size(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_rows(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_rows(gradient, ctx.group) / ctx.group.size(), None


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Incoming gradients are p times the contribution of each process's tokens (see above), so
        # their sum is p times too large.
        gradient = gradient / ctx.group.size()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
