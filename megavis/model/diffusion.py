"""Add noise to patches, and remove it step by step.

"Denoising Autoregressive Representation Learning", section 3.3 and appendix E, which follow
"Denoising Diffusion Probabilistic Models". Two of the printed formulas are not those of the
appendix's own derivation, which is followed here: the roots of equation (3) are those of (4) and
(5), √α (1 - γ'), and the denominator of (6) is √α √(1 - γ), as equation (2) has it.

Legend: x⁰ clean patch, x noisy patch, ε noise; γ in [0, 1] share of the signal's power, γ' that of
the step that comes next in the reverse process (γ' ≥ γ), α = γ / γ'; d numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""From noisy patches `[..., d]` and γ `[..., 1]` to an estimate of x⁰ `[..., d]`."""

_LARGEST_LOGIT = 18.0
"""Just beyond the logits of the smallest and the largest draw, 2^-25 and 1 - 2^-25."""
_NUM_POINTS = 8193
_NOTHING = 1e-6


class BetaNoise:
    """γ ~ Beta(a, b), by the inverse of its distribution function.

    The inverse has no closed form. It is tabulated once over the logit of the probability, which
    spreads both ends out, and interpolated on the device.
    """

    def __init__(self, a: float, b: float, device: torch.device) -> None:
        """Tabulate; a and b are above 0."""
        from scipy.special import betaincinv, expit

        logits = np.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _NUM_POINTS)
        table = betaincinv(a, b, expit(logits))
        self._table = torch.tensor(table, dtype=torch.float32, device=device)
        self._schedules: dict[int, Tensor] = {}

    def quantile(self, probability: Tensor) -> Tensor:
        """Return γ float32 with P(Beta ≤ γ) = probability, of which any shape lies in [0, 1]."""
        place = torch.logit(probability.float()).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        place = (place + _LARGEST_LOGIT) * ((_NUM_POINTS - 1) / (2.0 * _LARGEST_LOGIT))
        below = place.long().clamp(max=_NUM_POINTS - 2)
        return torch.lerp(self._table[below], self._table[below + 1], place - below)

    def from_uniform(self, draws: Tensor) -> Tensor:
        """Return γ for draws in [0, 1) that are multiples of 2^-24."""
        return self.quantile(draws + 2.0**-25)

    def schedule(self, num_steps: int) -> Tensor:
        """Return γ of the reverse process, float32 from 0 (noise) to 1 (clean).

        A process whose time s is uniform in [0, 1] and whose γ(s) is the quantile of 1 - s meets
        each γ as often as training does (section 3.3); its steps are 1 / `num_steps` (appendix F).
        Where the quantile is 0 or 1 to 6 digits, steps would change nothing and are left out, so
        there are `num_steps + 1` numbers or fewer. How many waits for the device: they are made
        once.
        """
        if num_steps not in self._schedules:
            self._schedules[num_steps] = self._make_schedule(num_steps)
        return self._schedules[num_steps]

    def _make_schedule(self, num_steps: int) -> Tensor:
        gammas = self.quantile(torch.arange(1, num_steps, device=self._table.device) / num_steps)
        inside = gammas[(gammas > _NOTHING) & (gammas < 1.0 - _NOTHING)]
        return torch.cat([inside.new_zeros(1), inside, inside.new_ones(1)])


def corrupt(clean: Tensor, noise: Tensor, gamma: Tensor) -> Tensor:
    """Return x = √γ x⁰ + √(1 - γ) ε; all `[..., d]` but γ, which may be `[..., 1]`."""
    return gamma.sqrt() * clean + (1.0 - gamma).sqrt() * noise


def clean_from_noise(noisy: Tensor, noise: Tensor, gamma: Tensor) -> Tensor:
    """Return x⁰ = (x - √(1 - γ) ε) / √γ for γ > 0 (appendix E, above equation 5)."""
    return (noisy - (1.0 - gamma).sqrt() * noise) / gamma.sqrt()


def posterior(
    noisy: Tensor, clean: Tensor, gamma: Tensor, gamma_before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of q(x' | x, x⁰), a step towards the clean patch (equation 4).

    Args:
        noisy: x `[..., d]`.
        clean: x⁰, or an estimate of it.
        gamma: γ of x, in [0, 1).
        gamma_before: γ' of x', in (0, 1] and at least γ.

    Returns:
        Mean `[..., d]`, and the variance, which has the shape of γ.
    """
    alpha = gamma / gamma_before
    of_noisy = alpha.sqrt() * (1.0 - gamma_before) / (1.0 - gamma)
    of_clean = gamma_before.sqrt() * (1.0 - alpha) / (1.0 - gamma)
    variance = (1.0 - alpha) * (1.0 - gamma_before) / (1.0 - gamma)
    return of_noisy * noisy + of_clean * clean, variance


def reverse_process(
    denoise: Denoiser, noise_of: Callable[[int], Tensor], gammas: Tensor, *, temperature: float = 1
) -> Tensor:
    """Draw patches, from pure noise to clean, by ancestral sampling.

    Args:
        denoise: estimates x⁰.
        noise_of: standard normal `[..., d]` for the start (0) and after step 1, 2, ...
        gammas: `[steps + 1]`, increasing, the last one 1.
        temperature: multiplies the noise that is added; 1 is the paper's process, other values are
            ours. Of Gaussian data it multiplies the deviation and leaves the mean; 0 leaves the
            mean of each step, a path without chance.

    Returns:
        `[..., d]`; the last step returns the estimate of x⁰ itself, as γ' is 1.
    """
    noisy = noise_of(0) * temperature
    for step in range(len(gammas) - 1):
        gamma, gamma_before = gammas[step], gammas[step + 1]
        clean = denoise(noisy, gamma.expand(*noisy.shape[:-1], 1))
        noisy, variance = posterior(noisy, clean, gamma, gamma_before)
        if step + 2 < len(gammas):
            noisy = noisy + temperature * variance.sqrt() * noise_of(step + 1)
    return noisy
