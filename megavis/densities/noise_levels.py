"""Noise levels of a diffusion density: which are drawn in training, and visited in sampling.

γ in [0, 1] is the signal's share of the power.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

_LARGEST_LOGIT = 18.0
"""Slightly more than the logit of the largest draw, 1 - 2^-25."""
_NUM_POINTS = 8193
"""Size of the table of quantiles."""
_NOTHING = 1e-6
"""Steps with γ closer than this to 0 or 1 are left out."""


class BetaNoise:
    """γ ~ Beta(a, b) with a, b > 0, sampled by the inverse of its cumulative distribution.

    The inverse has no closed form. It is tabulated once over the logit of the probability, which
    resolves both ends, and interpolated on the device.
    """

    def __init__(self, a: float, b: float, device: torch.device) -> None:
        # Imported here, so that a run without diffusion does not load SciPy.
        from scipy.special import betaincinv, expit

        logits = np.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _NUM_POINTS)
        # By NumPy: the table needs no copy back from a device, and torch has no inverse of the
        # incomplete beta function.
        table = betaincinv(a, b, expit(logits))
        self._table = torch.tensor(table, dtype=torch.float32, device=device)
        self._schedules: dict[int, Tensor] = {}

    def quantile(self, probability: Tensor) -> Tensor:
        """Return γ with P(Beta ≤ γ) = `probability`, in [0, 1]: float32 of the same shape."""
        place = torch.logit(probability.float()).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        place = (place + _LARGEST_LOGIT) * ((_NUM_POINTS - 1) / (2.0 * _LARGEST_LOGIT))
        below = place.long().clamp(max=_NUM_POINTS - 2)
        return torch.lerp(self._table[below], self._table[below + 1], place - below)

    def from_uniform(self, draws: Tensor) -> Tensor:
        """Return γ for uniform draws in [0, 1) that are multiples of 2^-24."""
        # The middle of a draw's cell, which is neither 0 nor 1.
        return self.quantile(draws + 2.0**-25)

    def schedule(self, num_steps: int) -> Tensor:
        """Return the γ of the reverse process, float32, increasing from 0 (noise) to 1 (clean).

        With time s uniform in [0, 1] and γ(s) the quantile of 1 - s, the process visits each γ as
        often as training does (section 3.3); the step size is 1 / `num_steps` (appendix F). Steps
        at which the quantile is 0 or 1 to 6 digits would change nothing and are left out, so there
        are at most `num_steps + 1` values. Cached, since their number is read from the device.
        """
        if num_steps not in self._schedules:
            steps = torch.arange(1, num_steps, device=self._table.device)
            gammas = self.quantile(steps / num_steps)
            # Kept, they would be 0 / 0 in `posterior`: two γ of 0 in α, two of 1 in the divisor 1 -
            # γ.
            inside = gammas[(gammas > _NOTHING) & (gammas < 1.0 - _NOTHING)]
            ends = inside.new_zeros(1), inside.new_ones(1)
            self._schedules[num_steps] = torch.cat([ends[0], inside, ends[1]])
        return self._schedules[num_steps]


@functools.cache
def beta_noise(a: float, b: float, device: torch.device) -> BetaNoise:
    """Return Beta(a, b), tabulated once per process and device."""
    return BetaNoise(a, b, device)
