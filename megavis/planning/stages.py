"""Divide layers into pipeline stages of about equal work."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from megavis.model.stack import LayerPlan, block_weights


def stage_bounds(plans: Sequence[LayerPlan], num_stages: int) -> list[int]:
    """Divide a list of layers into stages of about equal work, each with at least one block.

    Returns bounds: stage i holds `layers[bounds[i]:bounds[i + 1]]`.
    """
    places, weights = block_weights(plans)
    inner = balanced_bounds(tuple(weights), num_stages)[1:-1]
    return [0, *(places[block] for block in inner), len(plans)]


@functools.cache
def balanced_bounds(weights: tuple[float, ...], num_parts: int) -> tuple[int, ...]:
    """Divide weights into consecutive non-empty parts with the least possible largest sum.

    Among these, choose the division with the largest smallest part, then the one with the latest
    bounds, as DeepSpeed's `partition_balanced` does for equal weights. Returns bounds: part i is
    `weights[bounds[i]:bounds[i + 1]]`.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    # By number of weights: largest part, smallest part and bounds of the best division.
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
                # Prefer the last of equally good ones.
                longer[end] = min(reversed(cuts), key=lambda cut: (cut[0], -cut[1]))
        best = longer
    return tuple(best[len(weights)][2])
