"""Diffusion density: a decoder denoises each patch, conditioned on the backbone's output.

"Denoising Autoregressive Representation Learning", section 3.3 and appendices E and F, which follow
"Denoising Diffusion Probabilistic Models". In training each patch is corrupted with its own γ; in
sampling the decoder runs many times per patch. Two of the printed formulas deviate from the
appendix's own derivation, which is followed here: equation (3) has the roots of (4) and (5),
√α (1 - γ'), and the denominator of (6) is √α √(1 - γ), as in equation (2).

Legend: b images, q positions, d values of a patch; x⁰ clean patch, x noisy patch, ε noise; γ in
[0, 1] the signal's share of the power, γ' the next share in the reverse process (γ' ≥ γ),
α = γ / γ'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.decoders import PatchHead
from megavis.densities.density import (
    NO_DECODER,
    UNSCORED,
    DecoderWork,
    Density,
    Samples,
    SamplingKeys,
    TokenSampler,
    for_each_key,
)
from megavis.densities.noise_levels import beta_noise
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.parallel.random import normal, uniform

_SMALLEST_GAMMA = 1e-4
"""With predicted noise, x⁰ can be recovered only if x still contains some of it."""


@dataclass(frozen=True)
class DiffusionOptions:
    """Sampling options, by default the config's; raise UserError if out of range."""

    temperature: float | None = None
    """Multiplies the noise, 0 or more."""
    sampling_steps: int | None = None
    """Denoising steps, 1 or more."""

    def __post_init__(self) -> None:
        if self.sampling_steps is not None and self.sampling_steps < 1:
            raise UserError(f"the number of steps must be at least 1, not {self.sampling_steps}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"the temperature must be at least 0, not {self.temperature}")


class Diffusion(Density):
    """Denoising loss, and ancestral sampling.

    Args:
        build_head: builds a `PatchHead`.
        decoder: see `Density`; this is the cost of each sampling step.
    """

    options_type = DiffusionOptions
    names = ("gamma",)

    def __init__(
        self,
        num_outputs: int,
        process: DiffusionProcess,
        *,
        build_head: Callable[[], Head],
        decoder: DecoderWork = NO_DECODER,
    ) -> None:
        super().__init__(num_outputs, build_head)
        self.process, self.decoder = process, decoder

    def draw_noise(self, index: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Draw ε `[b, n, d]` and γ `[b, n, 1]` as functions of seed and sample."""
        width, seed = self.num_outputs, self.process.seed
        noise = normal(index, num_positions * width, seed=seed, purpose="noise")
        draws = uniform(index, num_positions, seed=seed, purpose="gamma")
        gamma = beta_noise(*self.process.beta, index.device).from_uniform(draws)
        return noise.unflatten(1, (num_positions, width)), gamma[..., None]

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Draw noise and γ; return the targets and the noisy patches.

        The choice `gamma`, a scalar or `[b, q, 1]` in [0, 1], replaces the drawn γ.
        """
        noise, gamma = self.draw_noise(index, tokens.shape[1])
        chosen = (choices or {}).get("gamma")
        if chosen is not None:
            gamma = _expanded(torch.as_tensor(chosen, device=gamma.device), gamma)
            if not bool(((gamma >= 0) & (gamma <= 1)).all()):
                raise UserError(f"gamma must be in [0, 1], not {chosen}")
        target = noise if self.process.predicts == "noise" else tokens
        return target, (with_gamma(corrupt(tokens, noise, gamma), gamma),)

    def blank_inputs(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
        """Return zeros `[b, m, d + 1]`."""
        return (torch.zeros(*shape, self.num_outputs + 1, device=device),)

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return L_SIMP, the mean squared error over the values of each patch: `[b, q]`."""
        return (predictions.float() - targets).square().mean(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the predicted patches or noise, `[b, q, d]`."""
        return predictions

    def token_sampler(self, options: DiffusionOptions, *, scored: bool) -> TokenSampler:
        """Return an ancestral sampler (appendices E and F); raise UserError if `scored`."""
        if scored:
            raise UserError(UNSCORED.format("a diffusion decoder"))
        process = self.process
        temperature = process.temperature if options.temperature is None else options.temperature
        return _AncestralSampling(
            self, options.sampling_steps or process.sampling_steps, temperature
        )


def _expanded(chosen: Tensor, drawn: Tensor) -> Tensor:
    """Expand a user's γ to the shape of drawn ones; raise UserError if it does not fit."""
    if chosen.ndim and chosen.shape != drawn.shape:
        raise UserError(
            f"gamma has shape {list(chosen.shape)}; it must be a number, or {list(drawn.shape)}"
        )
    return chosen.expand_as(drawn)


@dataclass(frozen=True)
class _AncestralSampling(TokenSampler):
    density: Diffusion
    num_steps: int
    temperature: float

    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        decoder = cast(PatchHead, head)
        shape, width = draws.keys.shape, self.density.num_outputs
        output = for_each_key(decoder.outputs(state)[:, -shape[1] :], draws)

        def noise_of(step: int) -> Tensor:
            return draws.normal(f"step/{step}", width).view(*shape, width)

        patches = reverse_process(
            partial(self._denoise, decoder, output),
            noise_of,
            beta_noise(*self.density.process.beta, output.device).schedule(self.num_steps),
            temperature=self.temperature,
        )
        return Samples(patches.float())

    def _denoise(self, head: PatchHead, output: Tensor, noisy: Tensor, gamma: Tensor) -> Tensor:
        """Estimate x⁰ `[b, q, d]`."""
        process = self.density.process
        predicts_noise = process.predicts == "noise"
        if predicts_noise:
            gamma = gamma.clamp(min=_SMALLEST_GAMMA)
        guess = head.decode(output, with_gamma(noisy, gamma)).float()
        if predicts_noise:
            guess = clean_from_noise(noisy, guess, gamma)
        return guess if process.value_range is None else guess.clamp(*process.value_range)


@dataclass(frozen=True)
class DiffusionProcess:
    """Parameters of the forward and reverse process.

    Attributes:
        beta: parameters (a, b) of γ ~ Beta(a, b) in training.
        predicts: whether the decoder predicts the clean patch or the noise.
        value_range: range of a patch's values, to which estimates are clamped; None: unbounded.
        temperature: multiplies the noise in sampling.
        seed: the run's seed; noise and γ of training are functions of seed and sample.
    """

    beta: tuple[float, float]
    predicts: Literal["clean", "noise"]
    value_range: tuple[float, float] | None
    sampling_steps: int
    temperature: float
    seed: int

    @classmethod
    def of(
        cls, keys: Any, *, value_range: tuple[float, float] | None, seed: int
    ) -> DiffusionProcess:
        """Return the process of a config section, which names the two parameters of beta apart."""
        return cls(
            (keys.noise_a, keys.noise_b),
            keys.predicts,
            value_range,
            keys.sampling_steps,
            keys.sampling_temperature,
            seed,
        )


def with_gamma(noisy: Tensor, gamma: Tensor) -> Tensor:
    """Append γ `[b, s, 1]` to noisy patches `[b, s, d]`."""
    return torch.cat([noisy, gamma], dim=-1)


Denoiser = Callable[[Tensor, Tensor], Tensor]
"""Maps noisy patches `[..., d]` and γ `[..., 1]` to an estimate of x⁰ `[..., d]`."""


def corrupt(clean: Tensor, noise: Tensor, gamma: Tensor) -> Tensor:
    """Return x = √γ x⁰ + √(1 - γ) ε; all are `[..., d]`, γ may be `[..., 1]`."""
    return gamma.sqrt() * clean + (1.0 - gamma).sqrt() * noise


def clean_from_noise(noisy: Tensor, noise: Tensor, gamma: Tensor) -> Tensor:
    """Return x⁰ = (x - √(1 - γ) ε) / √γ for γ > 0 (appendix E, above equation 5)."""
    return (noisy - (1.0 - gamma).sqrt() * noise) / gamma.sqrt()


def posterior(
    noisy: Tensor, clean: Tensor, gamma: Tensor, gamma_before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of q(x' | x, x⁰), one step towards the clean patch (equation 4).

    Args:
        noisy: x, `[..., d]`.
        clean: x⁰ or an estimate of it, `[..., d]`.
        gamma: γ of x, in [0, 1).
        gamma_before: γ' of x', in [γ, 1] and above 0.

    Returns:
        The mean `[..., d]`, and the variance in the shape of γ.
    """
    alpha = gamma / gamma_before
    of_noisy = alpha.sqrt() * (1.0 - gamma_before) / (1.0 - gamma)
    of_clean = gamma_before.sqrt() * (1.0 - alpha) / (1.0 - gamma)
    variance = (1.0 - alpha) * (1.0 - gamma_before) / (1.0 - gamma)
    return of_noisy * noisy + of_clean * clean, variance


def reverse_process(
    denoise: Denoiser, noise_of: Callable[[int], Tensor], gammas: Tensor, *, temperature: float = 1
) -> Tensor:
    """Sample patches from noise by ancestral sampling.

    Args:
        denoise: estimates x⁰.
        noise_of: returns standard normal noise `[..., d]` for the start (0) and after step 1, 2...
        gammas: `[steps + 1]`, increasing to 1.
        temperature: multiplies the noise; 1 is the paper's process, other values are an extension.
            For Gaussian data it scales the standard deviation and keeps the mean; 0 follows the
            mean of each step deterministically.

    Returns:
        `[..., d]`; since γ' is 1 in the last step, this is its estimate of x⁰.
    """
    noisy = noise_of(0) * temperature
    for step in range(len(gammas) - 1):
        gamma, gamma_before = gammas[step], gammas[step + 1]
        clean = denoise(noisy, gamma.expand(*noisy.shape[:-1], 1))
        noisy, variance = posterior(noisy, clean, gamma, gamma_before)
        # The variance of the last step is 0.
        if step + 2 < len(gammas):
            noisy = noisy + temperature * variance.sqrt() * noise_of(step + 1)
    return noisy
