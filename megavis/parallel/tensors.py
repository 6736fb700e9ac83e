"""How Megatron's layers mark a parameter as split over the tensor group."""

from __future__ import annotations

from typing import Any

from torch import nn

from megavis.parallel.context import tensor_rank


def partition_dimension(parameter: nn.Parameter) -> int | None:
    """Return the dimension that is split over the tensor group; None where all hold the whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    # Megatron's attributes are not known to torch's types.
    marked: Any = parameter
    return int(marked.partition_dim)


def is_first_copy(parameter: nn.Parameter) -> bool:
    """True for exactly one process of the tensor group for each piece of a logical tensor."""
    if partition_dimension(parameter) is not None:
        return True
    return tensor_rank() == 0
