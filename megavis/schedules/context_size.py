"""How many tokens a context holds; without torch, so that configs can be checked quickly."""

from __future__ import annotations


def context_size(num_positions: int, mask_ratio: float) -> int:
    """Return how many of the positions are read: 1 - mask_ratio of them, and at least one."""
    return max(1, round((1.0 - mask_ratio) * num_positions))
