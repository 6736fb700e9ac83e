"""Do latents that a model draws look like held-out ones? Their first moments, side by side.

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

    Returns:
        `mean`: in standard deviations of the held-out channel; `deviation`: largest ratio minus
        one; `beside` and `below`: of correlations.
    """
    ours, theirs = Moments.of(drawn), Moments.of(held_out)
    scale = torch.tensor(theirs.deviation)

    def largest(name: str) -> Tensor:
        difference = torch.tensor(getattr(ours, name)) - torch.tensor(getattr(theirs, name))
        return difference.abs()

    return {
        "num_drawn": len(drawn),
        "num_held_out": len(held_out),
        "largest_difference": {
            "mean": float((largest("mean") / scale).max()),
            "deviation": float((largest("deviation") / scale).max()),
            "beside": float(largest("beside").max()),
            "below": float(largest("below").max()),
        },
        "drawn": asdict(ours),
        "held_out": asdict(theirs),
    }


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of each channel, `[c]`."""
    pairs = [part.transpose(0, 1).flatten(1) for part in (first, second)]
    centred = [part - part.mean(1, keepdim=True) for part in pairs]
    product = (centred[0] * centred[1]).mean(1)
    return product / (centred[0].square().mean(1) * centred[1].square().mean(1)).sqrt()
