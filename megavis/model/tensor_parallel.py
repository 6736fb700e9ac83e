"""Gather the tokens that sequence parallelism has split over the tensor group.

Megatron's linear layers, plain on a CPU, and with whole bias gradients.

On a GPU a process that shares its layers with no other adds biases inside the product, those too
that the caller would add: one kernel less a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

# The only way from a forward pass into Megatron's linear layers, whose callers pass hidden states
# and nothing else; so it is a value of the calling context, as gradient mode is.
_WHOLE: ContextVar[bool] = ContextVar("tokens are whole", default=False)


class SequenceParallelConfig(Protocol):
    """A layer or config that says whether sequences are split over the tensor group."""

    @property
    def sequence_parallel(self) -> bool:
        """True under sequence parallelism."""


@contextlib.contextmanager
def whole_tokens() -> Iterator[None]:
    """Keep all tokens on each process of a tensor group inside the block.

    For forward passes without gradient over sequences that cannot be divided, as of a single token.
    Nothing is changed in layers or configs; they ask `splits_tokens`.
    """
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def splits_tokens(layer: SequenceParallelConfig) -> bool:
    """Return whether a layer, or all layers of a config, split sequences in this forward pass."""
    return layer.sequence_parallel and not _WHOLE.get()


def all_tokens(hidden: Tensor, config: SequenceParallelConfig, group: dist.ProcessGroup) -> Tensor:
    """Return `[s, b, h]` of the whole sequence, the same on every process of the tensor group.

    What follows must give every process the same gradient, as layers do that start with Megatron's
    copy region; the backward pass then takes this process's tokens out of it.
    """
    if not splits_tokens(config):
        return hidden
    return gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=group
    )


def own_tokens(hidden: Tensor, config: SequenceParallelConfig, group: dist.ProcessGroup) -> Tensor:
    """Return this process's tokens of `[s, b, h]`; s must divide by the tensor size."""
    if not splits_tokens(config):
        return hidden
    return scatter_to_sequence_parallel_region(hidden, group)


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """A linear layer split by output features, which every process of the tensor group keeps."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size]` to `[s, b, output_size / tensor size]` and a bias left over."""
        learns, alone = torch.is_grad_enabled(), self.tp_group.size() == 1
        if alone and not input_.is_cpu:
            return F.linear(input_, self.weight, self.bias), None
        if splits_tokens(self) or (learns and not input_.is_cpu):
            return super().forward(input_)
        # What Megatron does around the product serves the gradient on a GPU, and outside of
        # training it costs more than the product of a single token.
        if learns:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        if self.skip_bias_add:
            return F.linear(input_, self.weight), self.bias
        return F.linear(input_, self.weight, self.bias), None


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """A linear layer split by input features, which leaves its bias to the caller.

    Under sequence parallelism the bias is added to a part of the tokens, so its gradient is a
    partial sum; Megatron's copy region adds the parts up in the backward pass.
    """

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        # The MLP passes these three itself; attention relies on the defaults.
        options.setdefault("bias", options["config"].add_bias_linear)
        options.setdefault("input_is_parallel", True)
        options.setdefault("skip_bias_add", True)
        super().__init__(input_size, output_size, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size / tensor size]` to `[s, b, output_size]` and the bias."""
        splits = splits_tokens(self)
        if self.tp_group.size() == 1 and not input_.is_cpu:
            return F.linear(input_, self.weight, self.bias), None
        # Megatron's own forward pass reads the flag of the layer, which says what training does.
        if not splits and (input_.is_cpu or self.sequence_parallel):
            part = F.linear(input_, self.weight)
            return reduce_from_tensor_model_parallel_region(part, self.tp_group), self.bias
        output, bias = super().forward(input_)
        if bias is not None and splits:
            bias = copy_to_tensor_model_parallel_region(bias, self.tp_group)
        return output, bias
