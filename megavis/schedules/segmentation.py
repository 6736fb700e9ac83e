"""In which order a sequence is predicted, and in which groups.

A sequence of T tokens is put in an order z and cut into K + 1 consecutive groups G_0 .. G_K at the
boundaries n_0 < n_1 < ... < n_{K-1} < n_K = T. G_0 is given; each further group is predicted from
the groups before it. All is drawn on the device as a function of seed and sample, and nothing waits
for the host.

Legend: b images, T tokens, K predicted groups, S condition tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megavis.parallel.random import uniform
from megavis.schedules.boundaries import Segmentation

MEAN_SHARE, SHARE_DEVIATION = 0.5, 0.1
"""p ~ N(0.5, 0.1): the second number is the deviation in the code of appendix B."""


def draw_boundaries(
    kind: Segmentation, sample_index: Tensor, *, num_tokens: int, num_groups: int, seed: int
) -> Tensor:
    """Return n_0 .. n_{K-1} of each sample: int64 `[b, K]`, increasing, each in [0, T - 1].

    Args:
        kind: which of the paper's three settings.
        sample_index: int64 `[b]`.
        num_tokens: T.
        num_groups: K; at most `most_groups(kind, T)`.
        seed: the run's seed.
    """
    if kind == "fixed":
        fixed = fixed_length(num_tokens, num_groups, device=sample_index.device)
        return fixed.expand(len(sample_index), -1)
    draws = uniform(sample_index, num_tokens - 1, seed=seed, purpose="boundaries")
    if kind == "random":
        return _smallest(draws, num_groups)
    share = uniform(sample_index, 1, seed=seed, purpose="share")
    return mixed_length(draws, share, num_groups)


def fixed_length(num_tokens: int, num_groups: int, device: torch.device | None = None) -> Tensor:
    """Return `fixed_boundaries`, computed on the device: int64 `[K]`."""
    places = torch.arange(1, num_groups + 1, device=device)
    return places * num_tokens // (num_groups + 1)


def mixed_length(draws: Tensor, share: Tensor, num_groups: int) -> Tensor:
    """Return n_{K-1} = round(p T) with p ~ N(0.5, 0.1), and K - 1 random boundaries before it.

    The paper leaves open what to do when p is extreme. Here n_{K-1} is clamped to [K, T - 1]: then
    there are K - 1 places for the other boundaries and G_K is not empty. At T = 196 and K = 20 one
    image in about 30,000 is clamped.

    Args:
        draws: uniform `[b, T - 1]`, one for each place from 1 to T - 1.
        share: uniform `[b, 1]`, from which p is made.
        num_groups: K.
    """
    num_tokens = draws.shape[1] + 1
    normal = torch.erfinv(2.0 * share - 1.0) * 2.0**0.5
    last = (num_tokens * (MEAN_SHARE + SHARE_DEVIATION * normal)).round()
    last = last.clamp(num_groups, num_tokens - 1).long()
    places = torch.arange(1, num_tokens, device=draws.device)
    earlier = _smallest(draws.masked_fill(places >= last, 2.0), num_groups - 1)
    return torch.cat([earlier, last], dim=1)


def typical_boundaries(
    kind: Segmentation, num_tokens: int, num_groups: int, device: torch.device | None = None
) -> Tensor:
    """Return boundaries without a draw, in the middle of what training draws: int64 `[K]`.

    For features, which should not depend on chance: evenly spaced, with mixed length up to T / 2.
    """
    if kind != "mixed":
        return fixed_length(num_tokens, num_groups, device)
    last = min(max(round(MEAN_SHARE * num_tokens), num_groups), num_tokens - 1)
    return torch.arange(1, num_groups + 1, device=device) * last // num_groups


def _smallest(draws: Tensor, count: int) -> Tensor:
    """Return in ascending order the places, counted from 1, of the `count` smallest draws."""
    chosen = draws.argsort(dim=1, stable=True)[:, :count] + 1
    return chosen.sort(dim=1).values


def groups_of(boundaries: Tensor, num_tokens: int) -> Tensor:
    """Return the group of each place of the order: int64 `[b, T]`, from 0 to K.

    Args:
        boundaries: n_0 .. n_{K-1}, int64 `[b, K]`, increasing.
        num_tokens: T.
    """
    places = torch.arange(num_tokens, device=boundaries.device)
    return (boundaries[:, :, None] <= places).sum(dim=1)
