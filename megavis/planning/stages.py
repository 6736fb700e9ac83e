"""Which layers a pipeline stage holds: consecutive ones, of about the same work."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from megavis.model.parts import block_weights
from megavis.model.stack import LayerPlan


def stage_bounds(plans: Sequence[LayerPlan], num_stages: int) -> list[int]:
    """Cut a list of layers into stages of about equal work, each with at least one block.

    Returns:
        Bounds: stage i holds the layers from `bounds[i]` to before `bounds[i + 1]`.
    """
    places, weights = block_weights(plans)
    inner = balanced_bounds(tuple(weights), num_stages)[1:-1]
    return [0, *(places[block] for block in inner), len(plans)]


@functools.cache
def balanced_bounds(weights: tuple[float, ...], num_parts: int) -> tuple[int, ...]:
    """Cut weights into consecutive parts, none empty, whose largest sum is the least possible.

    Of such cuts the one with the largest smallest part, and of these the one with the latest
    bounds: equal weights are cut as DeepSpeed's `partition_balanced` cuts them.

    Args:
        weights: at least `num_parts`.
        num_parts: 1 or more.

    Returns:
        Bounds: part i is from `bounds[i]` to before `bounds[i + 1]`.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    # By number of weights: the largest and the smallest part of the best cut, and its bounds.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, math.inf, [0])}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(1, len(sums)):
            cuts = [
                (max(most, part), min(least, part), [*bounds, end])
                for start, (most, least, bounds) in best.items()
                if start < end
                for part in [sums[end] - sums[start]]
            ]
            if cuts:
                # The last of equally good ones.
                longer[end] = min(reversed(cuts), key=lambda cut: (cut[0], -cut[1]))
        best = longer
    return tuple(best[len(weights)][2])
