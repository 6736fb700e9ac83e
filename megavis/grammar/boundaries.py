"""Group boundaries and context sizes, computed without torch so that config checks stay fast.

Legend: T tokens, K predicted groups, n_0 < n_1 < ... < n_{K-1} the positions where groups end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Segmentation = Literal["fixed", "random", "mixed"]
Cut = Literal["fixed", "random", "mixed", "given"]
"""How a sequence is cut into groups: one of the paper's settings, or at given boundaries."""
MaskShape = Literal["tokens", "blocks", "grid"]
"""Which tokens of an image are hidden: random ones, random rectangles, or all but one of 2 × 2."""


def max_groups(kind: Segmentation, num_tokens: int) -> int:
    """Return the largest K: T with fixed length, where G_0 may be empty, else T - 1."""
    return num_tokens if kind == "fixed" else num_tokens - 1


def fixed_boundaries(num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return n_i = ⌊(i + 1) T / (K + 1)⌋ for i in 0 .. K - 1.

    The paper's brackets are taken as the floor: at K = T (K = 196 in table 4) this gives n_i = i,
    the factorisation of equation (8), whereas rounding would repeat a boundary.
    """
    return tuple(place * num_tokens // (num_groups + 1) for place in range(1, num_groups + 1))


def boundaries_error(boundaries: Sequence[int], num_tokens: int) -> str | None:
    """Return an error message unless 0 ≤ n_0 < ... < n_{K-1} < T."""
    numbers = list(boundaries)
    if not numbers or numbers != sorted(set(numbers)):
        return f"{numbers} does not increase: list where each group ends, once and in order"
    if numbers[0] < 0 or numbers[-1] >= num_tokens:
        return (
            f"{numbers} is out of range: groups of {num_tokens} tokens end at 0 to {num_tokens - 1}"
        )
    return None


def boundary_range(
    cut: Cut, num_tokens: int, num_groups: int, boundaries: Sequence[int] | None
) -> tuple[int, int]:
    """Return the smallest n_0 and the largest n_{K-1} over all images.

    Tokens before the former are never predicted and tokens from the latter on are never attended
    to, so neither is computed. The bounds must not depend on random draws: with drawn boundaries
    they are 0 and T.
    """
    if boundaries is None and cut == "fixed":
        boundaries = fixed_boundaries(num_tokens, num_groups)
    return (0, num_tokens) if boundaries is None else (boundaries[0], boundaries[-1])


def context_size(num_positions: int, mask_ratio: float) -> int:
    """Return the number of visible positions: a share of 1 - mask_ratio, and at least one.

    Rounded down, as in the released code of MAE.
    """
    # The margin is for products such as (1 - 0.8) * 5, which are below 1 in floating point.
    return max(1, math.floor((1.0 - mask_ratio) * num_positions + 1e-6))
