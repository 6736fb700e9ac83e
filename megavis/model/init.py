"""Weight initialisation: one function for each kind of matrix in a block.

A function fills a whole logical matrix in place; Megatron cuts out each process's part, so the
weights are the same at every tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megavis.model.declarations import without_decay

Fill = Callable[[Tensor], object]
"""Fills a tensor in place."""

_TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of N(0, 1) restricted to [-2, 2]."""


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


def filled(*shape: int, fill: Fill) -> nn.Parameter:
    """Return a parameter that is no matrix of a layer: a table or a learned token. No decay."""
    parameter = nn.Parameter(torch.empty(*shape))
    fill(parameter)
    without_decay(parameter)
    return parameter


def zeros(matrix: Tensor) -> object:
    """Fill with zeros."""
    return nn.init.zeros_(matrix)


def truncated_normal(std: float) -> Fill:
    """Return a fill with N(0, std²) without what lies beyond two deviations of the untruncated.

    It is widened to make up for the cut, so the numbers have the deviation that is asked for; so
    do Flax's LeCun and He initializers.
    """
    wide = std / _TRUNCATED_STD
    return partial(nn.init.trunc_normal_, mean=0.0, std=wide, a=-2.0 * wide, b=2.0 * wide)


def xavier_uniform(matrix: Tensor) -> object:
    """Fill with U(±√(6 / (rows + columns))) of the whole logical matrix."""
    return nn.init.xavier_uniform_(matrix)


def xavier_uniform_as_part_of(num_parts: int) -> Fill:
    """Return the fill of a square matrix that other code draws as one of several stacked ones.

    A Vision Transformer's queries, keys and values are usually one matrix of 3 h rows, which
    makes its bound smaller: √(6 / (h + 3 h)).
    """

    def fill(matrix: Tensor) -> object:
        bound = math.sqrt(6.0 / ((1 + num_parts) * matrix.shape[1]))
        return nn.init.uniform_(matrix, -bound, bound)

    return fill


def vision_transformer() -> Initialization:
    """Return the fills of MAE's released code: Xavier-uniform everywhere, q, k and v as one."""
    projection = xavier_uniform_as_part_of(3)
    return Initialization(projection, projection, *[xavier_uniform] * 3)


def scaled_by_size(width: int, depth: int, *, mlp: float) -> Initialization:
    """Return iGPT's fills (released code): normal, attention by width and depth.

    Args:
        width: hidden size.
        depth: number of blocks.
        mlp: deviation of the matrices of the MLP.
    """
    projection, output = normal(width**-0.5), normal((width * depth) ** -0.5)
    return Initialization(projection, projection, output, normal(mlp), normal(mlp))
