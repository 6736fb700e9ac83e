"""Boundaries of groups of tokens: arithmetic that configs need without torch.

Legend: T tokens, K predicted groups, which end at n_0 < n_1 < ... < n_{K-1}.

How many tokens a context holds; without torch, so that configs can be checked quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Segmentation = Literal["fixed", "random", "mixed"]
Cut = Literal["fixed", "random", "mixed", "given"]
"""How groups are cut: drawn or computed, or by boundaries that are given."""


def most_groups(kind: Segmentation, num_tokens: int) -> int:
    """Return the largest K: with fixed length G_0 may be empty, so that it is T, else T - 1."""
    return num_tokens if kind == "fixed" else num_tokens - 1


def fixed_boundaries(num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return n_i = ⌊(i + 1) T / (K + 1)⌋ for i in 0 .. K - 1.

    The brackets of the paper are read as the whole part: at K = T (table 4 has K = 196) this gives
    n_i = i, the factorisation of equation (8); rounding would repeat a boundary.
    """
    return tuple(place * num_tokens // (num_groups + 1) for place in range(1, num_groups + 1))


def fault_of_boundaries(boundaries: Sequence[int], num_tokens: int) -> str | None:
    """Say in a sentence what is wrong unless 0 ≤ n_0 < ... < n_{K-1} < T."""
    numbers = list(boundaries)
    if not numbers or numbers != sorted(set(numbers)):
        return f"{numbers} does not increase: name where each group ends, once and in order"
    if numbers[0] < 0 or numbers[-1] >= num_tokens:
        return (
            f"{numbers} leaves 0 to {num_tokens - 1}, where groups of {num_tokens} tokens can end"
        )
    return None


def bounds_of(
    cut: Cut, num_tokens: int, num_groups: int, boundaries: Sequence[int] | None
) -> tuple[int, int]:
    """Return the smallest n_0 and the largest n_{K-1} that any image can have.

    Tokens before the first are never asked for, tokens from the last on are never seen: neither is
    computed. Both must be known without a look at what was drawn, so drawn groups give 0 and T.
    """
    if boundaries is None and cut == "fixed":
        boundaries = fixed_boundaries(num_tokens, num_groups)
    return (0, num_tokens) if boundaries is None else (boundaries[0], boundaries[-1])


def context_size(num_positions: int, mask_ratio: float) -> int:
    """Return how many of the positions are read: 1 - mask_ratio of them, and at least one."""
    return max(1, round((1.0 - mask_ratio) * num_positions))
