"""Compare first and second moments of generated and held-out latents.

Legend: b images, c channels and h, w of the latents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of each channel over images and positions.

    Attributes:
        mean: `[c]`.
        deviation: `[c]`, standard deviations.
        horizontal: `[c]`, correlation of horizontal neighbours.
        vertical: `[c]`, correlation of vertical neighbours.
    """

    mean: list[float]
    deviation: list[float]
    horizontal: list[float]
    vertical: list[float]

    @classmethod
    def of(cls, latents: Tensor) -> Moments:
        """Compute the moments of latents `[b, c, h, w]`."""
        wide = latents.double()
        return cls(
            wide.mean((0, 2, 3)).tolist(),
            wide.transpose(0, 1).flatten(1).std(1).tolist(),
            _correlation(wide[..., 1:], wide[..., :-1]).tolist(),
            _correlation(wide[..., 1:, :], wide[..., :-1, :]).tolist(),
        )


def compare(drawn: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Return the moments of generated and held-out latents, and the largest differences."""
    return {
        "num_drawn": len(drawn),
        "num_held_out": len(held_out),
        "largest_difference": largest_differences(drawn, held_out),
        "drawn": asdict(Moments.of(drawn)),
        "held_out": asdict(Moments.of(held_out)),
    }


def largest_differences(latents: Tensor, held_out: Tensor) -> dict[str, float]:
    """Return the largest difference over channels between the moments of two sets of latents.

    `mean`: in standard deviations of the held-out channel; `deviation`: largest ratio minus one;
    `horizontal` and `vertical`: differences of correlations.
    """
    ours, theirs = asdict(Moments.of(latents)), asdict(Moments.of(held_out))
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
