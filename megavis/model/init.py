"""How weights start: one function for each kind of matrix in a block.

A function fills a whole logical matrix in place; Megatron cuts out each process's part, so the
weights are the same at every tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

Fill = Callable[[Tensor], object]


@dataclass(frozen=True)
class Initialization:
    """The fill of each kind of matrix in a block."""

    query: Fill
    key_value: Fill
    attention_output: Fill
    mlp_input: Fill
    mlp_output: Fill


def normal(std: float) -> Fill:
    """Return a fill with N(0, std²)."""
    return partial(nn.init.normal_, mean=0.0, std=std)


def zeros(matrix: Tensor) -> object:
    """Fill with zeros."""
    return nn.init.zeros_(matrix)
