"""Parameters: their initial values, and how they are trained and split.

Layers declare these properties as attributes of the parameter, as Megatron does, since ZeRO-3 and
the pipeline engine keep parameter objects but change their shapes.

Weight decay applies to all parameters with two or more dimensions, unless declared otherwise here:
tables (embeddings, codebooks, positions) and learned tokens do not decay. As in the released code
of MAE and GIVT, weights of linear layers and convolutions decay; biases and the gains of norms do
not.

A `Fill` initialises a whole logical matrix in place, and Megatron takes each process's shard of it,
so the weights are the same at every tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megavis.parallel.context import tensor_rank

_DECAY, _OPTIONS, _START = "declared_decay", "group_options", "finetuning_start"
_PARTIAL = "gradient_is_partial"

Decay = Literal["always", "as embedding", "never"]
"""Weight decay of a parameter: with `as embedding`, only if `optimizer.decay_embeddings` is set."""
Start = Literal["saved", "fresh", "saved or fresh"]
"""Weights of a parameter when fine-tuning starts from another run: the saved ones, the initial
ones (unless the run has the same head), or the saved ones if the run has them."""


@dataclass(frozen=True)
class ParamGroupOptions:
    """Optimizer options of a parameter that differ from the config's.

    Attributes:
        learning_rate_scale: multiplies the scheduled learning rate.
        betas: Adam's betas; the config's if None.
    """

    learning_rate_scale: float = 1.0
    betas: tuple[float, float] | None = None

    def scaled(self, factor: float) -> ParamGroupOptions:
        """Return a copy with the learning rate multiplied by `factor`."""
        return replace(self, learning_rate_scale=self.learning_rate_scale * factor)

    def within(self, layer: ParamGroupOptions) -> ParamGroupOptions:
        """Combine a parameter's options with its layer's; its own betas take precedence."""
        scaled = layer.scaled(self.learning_rate_scale)
        return scaled if self.betas is None else replace(scaled, betas=self.betas)


def set_decay(parameter: Tensor, decay: Decay) -> None:
    """Declare whether weight decay applies to a parameter, whatever its shape."""
    setattr(parameter, _DECAY, decay)


def decay_of(parameter: Tensor) -> Decay | None:
    """Return the declared weight decay; None: the shape decides."""
    return getattr(parameter, _DECAY, None)


def add_options(parameters: Iterable[Tensor], options: ParamGroupOptions) -> None:
    """Declare optimizer options of parameters, combined with earlier declarations."""
    for parameter in parameters:
        setattr(parameter, _OPTIONS, options_of(parameter).within(options))


def options_of(parameter: Tensor) -> ParamGroupOptions:
    """Return the options declared by `add_options`."""
    return getattr(parameter, _OPTIONS, ParamGroupOptions())


def set_start(parameters: Iterable[Tensor], start: Start) -> None:
    """Declare the weights that parameters start fine-tuning with; the default is `saved`."""
    for parameter in parameters:
        setattr(parameter, _START, start)


def starts_fresh(parameter: Tensor, *, is_saved: bool) -> bool:
    """Return whether a parameter keeps its initial weights when fine-tuning starts.

    `is_saved`: whether the pretrained run has this parameter.
    """
    start: Start = getattr(parameter, _START, "saved")
    return start == "fresh" or (start == "saved or fresh" and not is_saved)


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
    set_decay(parameter, "as embedding")
    return parameter


zeros: Fill = nn.init.zeros_


def truncated_normal(std: float) -> Fill:
    """Return an initialization with a normal truncated at two standard deviations.

    As in Flax's LeCun and He initializers, the normal is widened so that the values have standard
    deviation `std` after truncation.
    """
    # `trunc_normal_` with `std`, cut at 2 · std, would have a standard deviation of 0.88 · std.
    wide = std / _TRUNCATED_STD
    return partial(nn.init.trunc_normal_, mean=0.0, std=wide, a=-2.0 * wide, b=2.0 * wide)


xavier_uniform: Fill = nn.init.xavier_uniform_
"""U(±√(6 / (rows + columns))), for the shape of the whole logical matrix."""


def vision_transformer() -> Initialization:
    """Return the initialization of MAE's code: Xavier-uniform, with q, k and v as one matrix.

    That matrix has 3 h rows, so its bound √(6 / (h + 3 h)) is smaller than its parts' bounds.
    """

    def projection(matrix: Tensor) -> object:
        # MAE's code fills the joined q, k and v, `[3h, h]`, where Megatron asks for each
        # separately.
        bound = math.sqrt(6.0 / (4 * matrix.shape[1]))
        return nn.init.uniform_(matrix, -bound, bound)

    return Initialization(projection, projection, *[xavier_uniform] * 3)


def partition_dimension(parameter: nn.Parameter) -> int | None:
    """Return the dimension that is split over the tensor group; None if it is replicated."""
    # Megatron marks only the parameters that it partitions.
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    # torch's type does not declare Megatron's attributes.
    marked: Any = parameter
    return int(marked.partition_dim)


def set_partial_gradient(parameters: Iterable[Tensor]) -> None:
    """Declare that each process has only its own tokens' gradient, not its tensor group's."""
    for parameter in parameters:
        setattr(parameter, _PARTIAL, True)


def has_partial_gradient(parameter: Tensor) -> bool:
    """Return whether gradients are to be summed over the tensor group."""
    return getattr(parameter, _PARTIAL, False)


def is_first_copy(parameter: nn.Parameter) -> bool:
    """Return True on exactly one process of the tensor group per shard of a logical tensor."""
    if partition_dimension(parameter) is not None:
        return True
    return tensor_rank() == 0
