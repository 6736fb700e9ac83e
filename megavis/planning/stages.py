"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.utils import partition_balanced

from megavis.model.parts import block_weights
from megavis.model.stack import LayerPlan


def stage_bounds(plans: Sequence[LayerPlan], num_stages: int) -> list[int]:
    """Cut a list of layers into stages of about equal work, each with at least one block.

    Returns:
        Bounds: stage i holds the layers from `bounds[i]` to before `bounds[i + 1]`.
    """
    places, weights = block_weights(plans)
    inner = partition_balanced(weights, num_stages)[1:-1]
    return [0, *(places[int(block)] for block in inner), len(plans)]
