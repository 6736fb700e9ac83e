"""All tokens of a sequence, where sequence parallelism has split them over the tensor group."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor


def all_tokens(hidden: Tensor, config: TransformerConfig, group: dist.ProcessGroup) -> Tensor:
    """Return `[s, b, h]` of the whole sequence, the same on every process of the tensor group.

    What follows must give every process the same gradient, as layers do that start with Megatron's
    copy region; the backward pass then takes this process's tokens out of it.
    """
    if not config.sequence_parallel:
        return hidden
    return gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=group
    )


def own_tokens(hidden: Tensor, config: TransformerConfig, group: dist.ProcessGroup) -> Tensor:
    """Return this process's tokens of `[s, b, h]`; s must divide by the tensor size."""
    if not config.sequence_parallel:
        return hidden
    return scatter_to_sequence_parallel_region(hidden, group)
