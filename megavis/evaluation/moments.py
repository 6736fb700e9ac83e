"""Compare the first moments of generated latents with those of held-out ones.

Legend: b images, c channels and h, w of the latents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of each channel, over images and places.

    Attributes:
        mean: `[c]`.
        deviation: `[c]`, standard deviations.
        beside: `[c]`, correlation of neighbours in a row.
        below: `[c]`, correlation of neighbours in a column.
    """

    mean: list[float]
    deviation: list[float]
    beside: list[float]
    below: list[float]

    @classmethod
    def of(cls, latents: Tensor) -> Moments:
        """Measure latents `[b, c, h, w]`."""
        wide = latents.double()
        return cls(
            wide.mean((0, 2, 3)).tolist(),
            wide.transpose(0, 1).flatten(1).std(1).tolist(),
            _correlation(wide[..., 1:], wide[..., :-1]).tolist(),
            _correlation(wide[..., 1:, :], wide[..., :-1, :]).tolist(),
        )


def compare(drawn: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Return both moments, and the largest differences over the channels.

    Args:
        drawn: latents `[b, c, h, w]` of a model.
        held_out: latents `[b', c, h, w]` of images.
    """
    return {
        "num_drawn": len(drawn),
        "num_held_out": len(held_out),
        "largest_difference": largest_differences(drawn, held_out),
        "drawn": asdict(Moments.of(drawn)),
        "held_out": asdict(Moments.of(held_out)),
    }


def largest_differences(some: Tensor, held_out: Tensor) -> dict[str, float]:
    """Return how far the moments of some latents are from held-out ones, the worst channel's.

    Args:
        some: latents `[b, c, h, w]`.
        held_out: latents `[b', c, h, w]`.

    Returns:
        `mean`: in standard deviations of the held-out channel; `deviation`: largest ratio minus
        one; `beside` and `below`: of correlations.
    """
    ours, theirs = asdict(Moments.of(some)), asdict(Moments.of(held_out))
    scale = torch.tensor(theirs["deviation"])
    units = {"mean": scale, "deviation": scale}
    return {
        name: float(
            ((torch.tensor(ours[name]) - torch.tensor(value)).abs() / units.get(name, 1.0)).max()
        )
        for name, value in theirs.items()
    }


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of each channel, `[c]`."""
    pairs = [part.transpose(0, 1).flatten(1) for part in (first, second)]
    centred = [part - part.mean(1, keepdim=True) for part in pairs]
    product = (centred[0] * centred[1]).mean(1)
    return product / (centred[0].square().mean(1) * centred[1].square().mean(1)).sqrt()
