"""Noise levels of a diffusion density, as drawn in training and visited in sampling.

γ in [0, 1] is the signal's share of the power.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from megavis.grammar import words

_LARGEST_LOGIT = 18.0
"""Slightly more than the logit of the largest draw, 1 - 2^-25."""
_NUM_POINTS = 8193
"""Size of the table of quantiles."""
_NOTHING = 1e-6
"""Steps with γ closer than this to 0 or 1 are left out."""
_OFFSET, _LARGEST_BETA = 0.008, 0.999
"""s and the largest β of the cosine schedule."""


def noise_levels(keys: words.Diffusion, device: torch.device) -> BetaNoise | CosineNoise:
    """Return the noise levels of a config, with their tables on a device."""
    if keys.noise == "cosine":
        return cosine_noise(keys.noise_steps, device)
    return beta_noise(keys.noise_a, keys.noise_b, device)


class BetaNoise:
    """γ ~ Beta(a, b) with a, b > 0, sampled by the inverse of its cumulative distribution.

    The inverse has no closed form. It is tabulated once over the logit of the probability, which
    resolves both ends, and interpolated on the device.
    """

    tempers_start = True
    """Whether a temperature also scales the noise that sampling starts from."""

    def __init__(self, a: float, b: float, device: torch.device) -> None:
        # Imported here, so that a run without diffusion does not load SciPy.
        from scipy.special import betaincinv, expit

        logits = np.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _NUM_POINTS)
        # On the host: torch has no inverse of the incomplete beta function, and the table need not
        # be copied back from a device.
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
        # Take the middle of a draw's cell, which is neither 0 nor 1.
        return self.quantile(draws + 2.0**-25)

    def times(self, gamma: Tensor) -> Tensor:
        """Return the time of γ to be embedded, in [0, 1000] like steps of the cosine schedule."""
        return 1000.0 * (1.0 - gamma)

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
            # `posterior` would compute 0 / 0 from them: in α from two γ of 0, and with the divisor
            # 1 - γ from two of 1.
            inside = gammas[(gammas > _NOTHING) & (gammas < 1.0 - _NOTHING)]
            ends = inside.new_zeros(1), inside.new_ones(1)
            self._schedules[num_steps] = torch.cat([ends[0], inside, ends[1]])
        return self._schedules[num_steps]


@functools.cache
def beta_noise(a: float, b: float, device: torch.device) -> BetaNoise:
    """Return Beta(a, b), tabulated once per process and device."""
    return BetaNoise(a, b, device)


class CosineNoise:
    """The γ of a cosine schedule in discrete steps t from 0 (nearly clean) to T - 1 (noise).

    "Improved Denoising Diffusion Probabilistic Models", section 3.2: γ_t is the product of 1 - β
    up to t, where β_t = 1 - f(t + 1) / f(t) is at most 0.999, and f(t) = cos²((t / T + s) / (1 + s)
    · π / 2). Coefficients are computed in float64, since they are differences of nearly equal γ.

    Attributes:
        of_clean: weight of x⁰ in the mean of q(x' | x, x⁰), by step: float32 `[T]`.
        of_noise: √((1 - γ) / γ), which maps errors of ε to errors of x⁰, likewise.
        log_small: log β̃, the variance of q(x' | x, x⁰), likewise; at t = 0, where it is 0, that
            of t = 1.
        log_large: log β, likewise.
    """

    tempers_start = False
    """As in "Autoregressive Image Generation without Vector Quantization", section 3.2."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.num_steps = num_steps
        angles = (np.arange(num_steps + 1) / num_steps + _OFFSET) / (1.0 + _OFFSET) * math.pi / 2.0
        powers = np.cos(angles) ** 2
        betas = np.minimum(1.0 - powers[1:] / powers[:-1], _LARGEST_BETA)
        self._gammas = np.cumprod(1.0 - betas)
        before = np.append(1.0, self._gammas[:-1])
        small = betas * (1.0 - before) / (1.0 - self._gammas)
        small[0] = small[1]

        def table(values: np.ndarray) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.of_clean = table(betas * np.sqrt(before) / (1.0 - self._gammas))
        self.of_noise = table(np.sqrt((1.0 - self._gammas) / self._gammas))
        self.log_small, self.log_large = table(np.log(small)), table(np.log(betas))
        self._table = table(self._gammas)
        # Ascending, as a search needs it.
        self._ascending = self._table.flip(0).contiguous()

    def from_uniform(self, draws: Tensor) -> Tensor:
        """Return γ for uniform draws in [0, 1): each step equally often."""
        # With many steps, the product may be rounded up to T.
        steps = (draws * self.num_steps).long().clamp(max=self.num_steps - 1)
        return self._table[steps]

    def times(self, gamma: Tensor) -> Tensor:
        """Return the step t of γ, float32 in [0, T - 1], interpolated between steps.

        It is exact for γ in the table.
        """
        gamma = gamma.float().contiguous()
        place = torch.searchsorted(self._ascending, gamma).clamp(1, self.num_steps - 1)
        upper, lower = self._ascending[place], self._ascending[place - 1]
        part = ((upper - gamma) / (upper - lower).clamp(min=1e-12)).clamp(0.0, 1.0)
        return (self.num_steps - 1 - place) + part

    def schedule(self, num_steps: int) -> Tensor:
        """Return the γ of `num_steps` evenly spaced steps and 1 at the end, increasing: float64.

        The first and last step are kept; a single one is the last, noise.
        """
        spread = np.arange(num_steps) * ((self.num_steps - 1) / max(1, num_steps - 1))
        steps = np.round(spread).astype(int) if num_steps > 1 else np.array([self.num_steps - 1])
        return torch.tensor(np.append(self._gammas[steps[::-1]], 1.0), device=self._table.device)


@functools.cache
def cosine_noise(num_steps: int, device: torch.device) -> CosineNoise:
    """Return the cosine schedule, tabulated once per process and device."""
    return CosineNoise(num_steps, device)
