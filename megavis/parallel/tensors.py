"""How a parameter is split over the tensor group, as Megatron's layers have marked it."""

from __future__ import annotations

from megatron.core import parallel_state
from torch import nn


def partition_dimension(parameter: nn.Parameter) -> int | None:
    """Return the dimension that is split over the tensor group; None where all hold the whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)  # type: ignore[arg-type]


def is_first_copy(parameter: nn.Parameter) -> bool:
    """True for exactly one process of the tensor group for each piece of a logical tensor."""
    if partition_dimension(parameter) is not None:
        return True
    return parallel_state.get_tensor_model_parallel_rank() == 0
