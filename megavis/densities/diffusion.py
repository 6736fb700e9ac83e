"""Diffusion density: a decoder denoises each patch, conditioned on the backbone's output.

"Denoising Autoregressive Representation Learning", section 3.3 and appendices E and F, which follow
"Denoising Diffusion Probabilistic Models". In training each patch is corrupted with its own γ; in
sampling the decoder runs many times per patch. Two of the printed formulas deviate from the
appendix's own derivation, which is followed here: equation (3) has the roots of (4) and (5),
√α (1 - γ'), and the denominator of (6) is √α √(1 - γ), as in equation (2).

Alternatively, the noise levels are the steps of a cosine schedule, of which generation visits some,
and the variance of a step is predicted too: "Improved Denoising Diffusion Probabilistic Models",
sections 3.1 and 3.2, as in the released code of "Autoregressive Image Generation without Vector
Quantization". Its classifier-free guidance combines predictions with and without a class.

Legend: b images, q positions, d values of a patch, k noisy copies of each; x⁰ clean patch, x noisy
patch, ε noise; γ in [0, 1] the signal's share of the power, γ' the next share in the reverse
process (γ' ≥ γ), α = γ / γ'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.decoders import PatchHead
from megavis.densities.density import (
    UNSCORED,
    DecoderWork,
    Density,
    Samples,
    SamplingKeys,
    TokenSampler,
    check_guidance_schedule,
    check_not_negative,
    for_each_key,
)
from megavis.densities.noise_levels import CosineNoise, noise_levels
from megavis.grammar import words
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.parallel.random import normal, uniform


@dataclass(frozen=True)
class DiffusionOptions:
    """Sampling options, by default the config's; raise UserError if out of range."""

    temperature: float | None = None
    """Multiplies the noise, 0 or more."""
    sampling_steps: int | None = None
    """Denoising steps, 1 or more."""
    guidance: float = 0.0
    """w of classifier-free guidance, 0 or more: predictions are (1 + w) · ε - w · ε', where ε' is
    predicted without a class. Other papers call 1 + w the guidance scale."""
    guidance_schedule: str | None = None
    """`constant` (None), or `linear`: w times the share of the tokens known after a step, as in the
    released code of "Autoregressive Image Generation without Vector Quantization"."""

    def __post_init__(self) -> None:
        if self.sampling_steps is not None and self.sampling_steps < 1:
            raise UserError(f"the number of steps must be at least 1, not {self.sampling_steps}")
        check_not_negative(temperature=self.temperature, guidance=self.guidance)
        check_guidance_schedule(self.guidance_schedule, self.guidance)

    def weight(self, share_known: float) -> float:
        """Return w for a step after which this share of the tokens is known."""
        return self.guidance * (share_known if self.guidance_schedule == "linear" else 1.0)


class Diffusion(Density):
    """Denoising loss, and ancestral sampling.

    Args:
        keys: the config's.
        width: values of a patch.
        value_range: range of a patch's values, to which estimates are clamped; None: unbounded.
        seed: the run's seed; noise and γ of training are functions of seed and sample.
        build_head: builds a `PatchHead`.
        decoder: see `Density`.
    """

    options_type = DiffusionOptions
    names = ("gamma",)

    def __init__(
        self,
        keys: words.Diffusion,
        *,
        width: int,
        value_range: tuple[float, float] | None,
        seed: int,
        build_head: Callable[[], Head],
        decoder: DecoderWork,
    ) -> None:
        super().__init__(width * (1 + keys.learns_variance), build_head)
        self.keys, self.width, self.decoder = keys, width, decoder
        self.value_range, self.seed = value_range, seed

    def draw_noise(self, index: Tensor, num_positions: int, copy: int = 0) -> tuple[Tensor, Tensor]:
        """Draw ε `[b, n, d]` and γ `[b, n, 1]` as functions of seed, sample and noisy copy."""
        width, seed, place = self.width, self.seed, f"/{copy}" if copy else ""
        noise = normal(index, num_positions * width, seed=seed, purpose=f"noise{place}")
        draws = uniform(index, num_positions, seed=seed, purpose=f"gamma{place}")
        gamma = noise_levels(self.keys, index.device).from_uniform(draws)
        return noise.unflatten(1, (num_positions, width)), gamma[..., None]

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Draw noise and γ; return the targets `[b, q, k · t]` and noisy patches `[b, q, k · d']`.

        Targets are x⁰ or ε, t = d; with a learned variance x⁰, ε and γ, t = 2 d + 1. Each noisy
        patch is followed by its γ, d' = d + 1. The choice `gamma`, a scalar or `[b, q, 1]` in
        [0, 1], replaces the drawn γ.
        """
        copies = range(self.keys.noises_per_token)
        pairs = [self._corrupted(tokens, index, choices, copy) for copy in copies]
        targets, noisy = (torch.cat(parts, dim=-1) for parts in zip(*pairs, strict=True))
        return targets, (noisy,)

    def _corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None, copy: int
    ) -> tuple[Tensor, Tensor]:
        """Return targets and noisy patches of one copy."""
        noise, gamma = self.draw_noise(index, tokens.shape[1], copy)
        chosen = (choices or {}).get("gamma")
        if chosen is not None:
            gamma = _expanded(torch.as_tensor(chosen, device=gamma.device), gamma)
            if not bool(((gamma >= 0) & (gamma <= 1)).all()):
                raise UserError(f"gamma must be in [0, 1], not {chosen}")
        target = noise if self.keys.predicts == "noise" else tokens
        if self.keys.learns_variance:
            target = torch.cat([tokens.float(), noise, gamma], dim=-1)
        return target, with_gamma(corrupt(tokens, noise, gamma), gamma)

    def blank_inputs(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
        """Return zeros `[b, m, d + 1]`."""
        return (torch.zeros(*shape, self.width + 1, device=device),)

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each patch, a mean over its noisy copies: `[b, q]`.

        It is L_SIMP, the mean squared error over the values of a patch; with a learned variance,
        also the term of the variational bound.
        """
        count = self.keys.noises_per_token
        predictions = predictions.float().unflatten(-1, (count, -1))
        targets = targets.unflatten(-1, (count, -1))
        if not self.keys.learns_variance:
            return (predictions - targets).square().mean(-1).mean(-1)
        clean, noise, gamma = targets.split([self.width, self.width, 1], dim=-1)
        guess, spread = predictions.chunk(2, dim=-1)
        error = guess - (noise if self.keys.predicts == "noise" else clean)
        bound = self._bound(error.detach(), spread, clean, gamma[..., 0])
        return (error.square().mean(-1) + bound).mean(-1)

    def _bound(self, error: Tensor, spread: Tensor, clean: Tensor, gamma: Tensor) -> Tensor:
        """Return the term of the variational bound, in bits per value: `[b, q, k]`.

        As in the released code, the last step scores the bin of x⁰ among 255 between -1 and 1, and
        the bound trains only the variance.

        Args:
            error: error of the prediction, without gradient, `[b, q, k, d]`.
            spread: the output that determines the variance, `[b, q, k, d]`; see `log_variance`.
            clean: x⁰, `[b, q, k, d]`.
            gamma: γ, `[b, q, k]`.
        """
        levels = noise_levels(self.keys, gamma.device)
        assert isinstance(levels, CosineNoise)
        steps = levels.times(gamma).round().long()[..., None]
        small, large = levels.log_small[steps], levels.log_large[steps]
        log_scale = log_variance(spread, small, large)
        if self.keys.predicts == "noise":
            error = -levels.of_noise[steps] * error
        # The means' terms in x cancel.
        divergence = gaussian_divergence(levels.of_clean[steps] * error, small, log_scale)
        unlikely = -log_bin(clean, clean + error, 0.5 * log_scale)
        return torch.where(steps == 0, unlikely, divergence).mean(-1) / math.log(2.0)

    def token_sampler(self, options: DiffusionOptions, *, scored: bool) -> TokenSampler:
        """Return an ancestral sampler (appendices E and F); raise UserError if `scored`."""
        if scored:
            raise UserError(UNSCORED.format("a diffusion decoder"))
        keys, temperature = self.keys, options.temperature
        steps = options.sampling_steps or keys.sampling_steps
        if keys.noise == "cosine" and steps > keys.noise_steps:
            raise UserError(
                f"the number of steps must be at most {keys.noise_steps}, the length of the cosine"
                f" schedule, not {steps}"
            )
        temperature = keys.sampling_temperature if temperature is None else temperature
        return _AncestralSampling(self, steps, temperature, options)


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
    choice: DiffusionOptions

    @property
    def num_lanes(self) -> int:
        """Two with guidance."""
        return 2 if self.choice.guidance else 1

    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        decoder = cast(PatchHead, head)
        shape, width = draws.keys.shape, self.density.width
        outputs = decoder.outputs(state)[:, -shape[1] :].chunk(self.num_lanes)
        output = torch.cat([for_each_key(lane, draws) for lane in outputs])

        def noise_of(step: int) -> Tensor:
            return draws.normal(f"step/{step}", width).view(*shape, width)

        levels = noise_levels(self.density.keys, output.device)
        patches = reverse_process(
            partial(self._denoise, decoder, output, self.choice.weight(draws.share_known)),
            noise_of,
            levels.schedule(self.num_steps),
            temperature=self.temperature,
            tempers_start=levels.tempers_start,
        )
        return Samples(patches.float())

    def _denoise(
        self, head: PatchHead, output: Tensor, weight: float, noisy: Tensor, gamma: Tensor
    ) -> Estimate:
        """Estimate x⁰ `[b, q, d]`, and the variance if it is learned.

        Args:
            output: the decoder's input `[b, q, h]`; with guidance, twice as many rows, the second
                half without a class.
            weight: w of the guidance.
        """
        keys, value_range = self.density.keys, self.density.value_range
        predicts_noise = keys.predicts == "noise"
        if predicts_noise:
            # x⁰ can be recovered only if x still contains some of it.
            gamma = gamma.clamp(min=keys.least_signal)
        inputs = torch.cat([with_gamma(noisy, gamma)] * self.num_lanes)
        given, *free = head.decode(output, inputs).float().chunk(self.num_lanes)
        guess, spread = given[..., : self.density.width], given[..., self.density.width :]
        if free:
            # Guide only the guess; the variance is the one with the class, as in the released code.
            guess = guess + weight * (guess - free[0][..., : self.density.width])
        if predicts_noise:
            guess = clean_from_noise(noisy, guess, gamma)
        clean = guess if value_range is None else guess.clamp(*value_range)
        return (clean, spread) if keys.learns_variance else clean


def with_gamma(noisy: Tensor, gamma: Tensor) -> Tensor:
    """Append γ `[b, s, 1]` to noisy patches `[b, s, d]`."""
    return torch.cat([noisy, gamma], dim=-1)


Estimate = Tensor | tuple[Tensor, Tensor]
"""An estimate of x⁰ `[..., d]`; or it, and the output that determines the variance `[..., d]`."""
Denoiser = Callable[[Tensor, Tensor], Estimate]
"""Maps noisy patches `[..., d]` and γ `[..., 1]` to an estimate of x⁰."""


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


def log_variance(spread: Tensor, log_small: Tensor, log_large: Tensor) -> Tensor:
    """Return the logarithm of a step's variance, between log β̃ at -1 and log β at 1.

    "Improved Denoising Diffusion Probabilistic Models", equation 15, with v = (spread + 1) / 2.
    """
    return torch.lerp(log_small.expand_as(spread), log_large.expand_as(spread), (spread + 1) / 2)


def gaussian_divergence(distance: Tensor, log_true: Tensor, log_model: Tensor) -> Tensor:
    """Return KL(true || model) of Gaussians in nats.

    Args:
        distance: difference of their means.
        log_true: logarithm of the true variance.
        log_model: logarithm of the model's variance.
    """
    ratio = log_true - log_model
    return 0.5 * (ratio.exp() - ratio - 1.0 + distance.square() * torch.exp(-log_model))


def log_bin(values: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Return the logarithm of a Gaussian's mass in the bins of values, of width 2 / 255.

    The bins below -0.999 and above 0.999 are open, no mass is below 1e-12, and the cumulative
    distribution is approximated by a tanh, all as in the released code: see "Denoising Diffusion
    Probabilistic Models", equation 13.
    """
    inverse, centred = torch.exp(-log_deviation), values - mean
    above, below = (_cumulative(inverse * (centred + edge)) for edge in (1 / 255, -1 / 255))
    inside = torch.where(values > 0.999, 1.0 - below, above - below)
    return torch.where(values < -0.999, above, inside).clamp(min=1e-12).log()


def _cumulative(values: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (values + 0.044715 * values**3)))


def reverse_process(
    denoise: Denoiser,
    noise_of: Callable[[int], Tensor],
    gammas: Tensor,
    *,
    temperature: float = 1,
    tempers_start: bool = True,
) -> Tensor:
    """Sample patches from noise by ancestral sampling.

    Args:
        denoise: estimates x⁰.
        noise_of: returns standard normal noise `[..., d]` for the start (0) and after step 1, 2...
        gammas: `[steps + 1]`, increasing to 1.
        temperature: multiplies the noise; 1 is the paper's process, other values are an extension.
            For Gaussian data it scales the standard deviation and keeps the mean; 0 follows the
            mean of each step deterministically.
        tempers_start: multiply the noise at the start too.

    Returns:
        `[..., d]`; since γ' is 1 in the last step, this is its estimate of x⁰.
    """
    noisy = noise_of(0) * (temperature if tempers_start else 1.0)
    for step in range(len(gammas) - 1):
        gamma, gamma_before = gammas[step], gammas[step + 1]
        estimate = denoise(noisy, gamma.to(noisy.dtype).expand(*noisy.shape[:-1], 1))
        clean, *spread = (estimate,) if isinstance(estimate, Tensor) else estimate
        # γ is a 0-dim tensor, so that the result has the precision of x, not of γ.
        noisy, variance = posterior(noisy, clean, gamma, gamma_before)
        # The variance of the last step is 0.
        if step + 2 < len(gammas):
            deviation = variance.sqrt()
            if spread:
                largest = torch.log(1.0 - gamma / gamma_before)
                bounds = (each.to(noisy.dtype) for each in (variance.log(), largest))
                deviation = torch.exp(0.5 * log_variance(spread[0], *bounds))
            noisy = noisy + temperature * deviation * noise_of(step + 1)
    return noisy
