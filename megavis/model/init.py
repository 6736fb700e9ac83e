"""Weight initialization.

A `Fill` initialises a whole logical matrix in place, and Megatron takes each process's shard of it,
so the weights are the same at every tensor-parallel size.
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
    """The initialization of each matrix in a block."""

    query: Fill
    key_value: Fill
    attention_output: Fill
    mlp_input: Fill
    mlp_output: Fill


def normal(std: float) -> Fill:
    """Return an initialization with N(0, std²)."""
    return partial(nn.init.normal_, mean=0.0, std=std)


def filled(*shape: int, fill: Fill) -> nn.Parameter:
    """Return an initialised parameter without weight decay: a table or a learned token."""
    parameter = nn.Parameter(torch.empty(*shape))
    fill(parameter)
    without_decay(parameter)
    return parameter


zeros: Fill = nn.init.zeros_


def truncated_normal(std: float) -> Fill:
    """Return an initialization with a normal truncated at two standard deviations.

    As in Flax's LeCun and He initializers, the normal is widened so that the values have standard
    deviation `std` after truncation.
    """
    wide = std / _TRUNCATED_STD
    return partial(nn.init.trunc_normal_, mean=0.0, std=wide, a=-2.0 * wide, b=2.0 * wide)


xavier_uniform: Fill = nn.init.xavier_uniform_
"""U(±√(6 / (rows + columns))), for the shape of the whole logical matrix."""


def xavier_uniform_as_part_of(num_parts: int) -> Fill:
    """Return Xavier-uniform initialization of a square matrix as one of `num_parts` stacked ones.

    Vision Transformers usually have one matrix of 3 h rows for queries, keys and values, whose
    bound √(6 / (h + 3 h)) is smaller.
    """

    def fill(matrix: Tensor) -> object:
        bound = math.sqrt(6.0 / ((1 + num_parts) * matrix.shape[1]))
        return nn.init.uniform_(matrix, -bound, bound)

    return fill


def vision_transformer() -> Initialization:
    """Return the initialization of MAE's code: Xavier-uniform, with q, k and v as one matrix."""
    projection = xavier_uniform_as_part_of(3)
    return Initialization(projection, projection, *[xavier_uniform] * 3)


def scaled_by_size(width: int, depth: int, *, mlp: float) -> Initialization:
    """Return the initialization of iGPT's released code: normal, scaled by width and depth.

    `mlp` is the standard deviation of the MLP's matrices.
    """
    projection, output = normal(width**-0.5), normal((width * depth) ** -0.5)
    return Initialization(projection, projection, output, normal(mlp), normal(mlp))
