"""How a half of a block is added to the residual stream: with dropout, and for some images not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor


def add_to_residual(
    *, dropout: float, drop_path: float
) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return Megatron's sum of bias, dropout and residual with probabilities of its own.

    Args:
        dropout: probability that a number of the half is dropped.
        drop_path: probability that an image skips the half; what is kept is divided by the rest
            ("Deep Networks with Stochastic Depth", drawn for each image).

    Returns:
        What Megatron calls with `training` and a fusion flag, and then with `([s, b, h], bias or
        None)`, the residual `[s, b, h]` and a probability, which is not used.
    """

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        if training and drop_path:
            return skip_or_add
        add = get_bias_dropout_add(training, fused)
        return lambda mixed, residual, _: add(mixed, residual, dropout)

    def skip_or_add(half: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        mixed, bias = half
        mixed = F.dropout(mixed if bias is None else mixed + bias, p=dropout)
        kept = torch.rand(1, mixed.shape[1], 1, device=mixed.device) >= drop_path
        return residual + mixed * (kept / (1.0 - drop_path)).to(mixed.dtype)

    return build


def drop_path_of(number: int, num_layers: int, rate: float) -> float:
    """Return the probability for block `number`, from 1: none in the first, `rate` in the last.

    DeiT's rule: linear in between.
    """
    return rate * (number - 1) / max(1, num_layers - 1)
