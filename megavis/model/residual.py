"""Add a part of a block to the residual stream, with a dropout of its own."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor


def add_to_residual(dropout: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return Megatron's sum of bias, dropout and residual with a probability of its own.

    Args:
        dropout: probability that a number of the part is dropped.

    Returns:
        What Megatron calls with `training` and a fusion flag, and then with `([s, b, h], bias or
        None)`, the residual `[s, b, h]` and a probability, which is not used.
    """

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)
        return lambda mixed, residual, _: add(mixed, residual, dropout)

    return build
