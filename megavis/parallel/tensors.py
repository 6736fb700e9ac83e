"""Query Megatron's tensor-parallel attributes of parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from megavis.parallel.context import tensor_rank


def partition_dimension(parameter: nn.Parameter) -> int | None:
    """Return the dimension that is split over the tensor group; None if it is replicated."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    # torch's type does not declare Megatron's attributes.
    marked: Any = parameter
    return int(marked.partition_dim)


def is_first_copy(parameter: nn.Parameter) -> bool:
    """Return True on exactly one process of the tensor group per shard of a logical tensor."""
    if partition_dimension(parameter) is not None:
        return True
    return tensor_rank() == 0
