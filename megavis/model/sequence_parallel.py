"""Gather the tokens that sequence parallelism has split over the tensor group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
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
