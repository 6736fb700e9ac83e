"""Patches out of noise, given what a backbone makes of those before them.

"Denoising Autoregressive Representation Learning", section 3.3 and appendices E and F: each patch
is corrupted with a γ of its own, and a decoder that runs many times a patch takes the noise away.

Legend: b images, q positions, d numbers of a patch; γ in [0, 1] share of the signal's power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.base import Density, Drawing, Drawn, Draws, for_each_key
from megavis.densities.decoders import NO_DECODER, DecoderWork
from megavis.model.diffusion import BetaNoise, clean_from_noise, corrupt, reverse_process
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.parallel.random import normal, uniform

_SMALLEST_GAMMA = 1e-4
"""Where noise is predicted, x⁰ follows from it only if some of x⁰ is left."""


class DenoisingHead(Protocol):
    """A last layer that decodes as often as it is asked."""

    def outputs(self, state: PackedState) -> Tensor:
        """Return the backbone's output `[b, s, h]`."""

    def decode(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode `[b, s, h]` and noisy patches with γ behind each, `[b, s, d + 1]`: `[b, s, d]`."""


@dataclass(frozen=True)
class DiffusionOptions:
    """How a patch is drawn.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float | None = None
    """Multiplies noise, 0 or more; the config's when absent."""
    sampling_steps: int | None = None
    """From noise to a patch, 1 or more; the config's when absent."""

    def __post_init__(self) -> None:
        if self.sampling_steps is not None and self.sampling_steps < 1:
            raise UserError(f"the number of steps must be at least 1, not {self.sampling_steps}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"the temperature must be at least 0, not {self.temperature}")


@dataclass(frozen=True)
class DiffusionProcess:
    """How noise is added, and taken away when patches are drawn.

    Attributes:
        beta: parameters a, b of the distribution of γ.
        predicts: what the decoder gives.
        value_range: smallest and largest number that a patch can hold; an estimate beyond can only
            be wrong. None: there is no bound.
        sampling_steps: from noise to a patch.
        temperature: multiplies noise in sampling.
        seed: of the run, which with the sample decides noise and γ of training.
    """

    beta: tuple[float, float]
    predicts: Literal["clean", "noise"]
    value_range: tuple[float, float] | None
    sampling_steps: int
    temperature: float
    seed: int


class Diffusion(Density):
    """A decoder that takes noise from patches."""

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
        """Build.

        Args:
            num_outputs: d.
            process: see there.
            build_head: a `DenoisingHead`.
            decoder: see `Density`; in sampling every step costs as much again.
        """
        self.num_outputs, self.process, self._build = num_outputs, process, build_head
        self.decoder = decoder
        self._beta: dict[torch.device, BetaNoise] = {}

    def build_head(self) -> Head:
        """Return the last layer."""
        return self._build()

    def beta(self, device: torch.device) -> BetaNoise:
        """Return the distribution of γ, tabulated once a device."""
        if device not in self._beta:
            self._beta[device] = BetaNoise(*self.process.beta, device)
        return self._beta[device]

    def draw_noise(self, index: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return ε `[b, n, d]` and γ `[b, n, 1]`, functions of seed and sample alone."""
        width, seed = self.num_outputs, self.process.seed
        noise = normal(index, num_positions * width, seed=seed, purpose="noise")
        draws = uniform(index, num_positions, seed=seed, purpose="gamma")
        gamma = self.beta(index.device).from_uniform(draws)
        return noise.unflatten(1, (num_positions, width)), gamma[..., None]

    def noisy(self, clean: Tensor, noise: Tensor, gamma: Tensor) -> Tensor:
        """Return what the head reads besides the backbone's output: `[b, n, d + 1]`."""
        return with_gamma(corrupt(clean, noise, gamma), gamma)

    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        """Return what is predicted, `[b, n, d]`."""
        return noise if self.process.predicts == "noise" else clean

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Draw noise and γ; return what is predicted, and what the head reads.

        γ can be chosen: `gamma`, a number or `[b, q, 1]`, from 0 to 1.
        """
        noise, gamma = self.draw_noise(index, tokens.shape[1])
        chosen = (choices or {}).get("gamma")
        if chosen is not None:
            gamma = torch.as_tensor(chosen, device=gamma.device).expand_as(gamma)
            if not bool(((gamma >= 0) & (gamma <= 1)).all()):
                raise UserError(f"gamma must lie in 0..1, not {chosen}")
        return self.target(tokens, noise), (self.noisy(tokens, noise, gamma),)

    def nothing_more(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
        """Return zeros `[b, m, d + 1]`."""
        return (torch.zeros(*shape, self.num_outputs + 1, device=device),)

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return L_SIMP's squared error a number: `[b, q]`."""
        return (predictions.float() - targets).square().mean(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches, or noise, `[b, q, d]`."""
        return predictions

    def drawing(self, options: DiffusionOptions, *, scored: bool) -> Drawing:
        """Return what draws patches by ancestral sampling (appendices E and F).

        Raises:
            UserError: the likelihood is wanted, which this process does not give.
        """
        if scored:
            raise UserError("a search needs likelihoods, which a diffusion decoder does not give")
        process = self.process
        temperature = process.temperature if options.temperature is None else options.temperature
        return _TakesNoiseAway(self, options.sampling_steps or process.sampling_steps, temperature)


@dataclass(frozen=True)
class _TakesNoiseAway(Drawing):
    density: Diffusion
    num_steps: int
    temperature: float

    def __call__(self, head: nn.Module, state: PackedState, draws: Draws) -> Drawn:
        decoder = cast(DenoisingHead, head)
        shape, width = draws.keys.shape, self.density.num_outputs
        output = for_each_key(decoder.outputs(state)[:, -shape[1] :], draws)

        def noise_of(step: int) -> Tensor:
            return draws.normal(f"{draws.name} step {step}", width).view(*shape, width)

        patches = reverse_process(
            partial(self._denoise, decoder, output),
            noise_of,
            self.density.beta(output.device).schedule(self.num_steps),
            temperature=self.temperature,
        )
        return Drawn(patches.float())

    def _denoise(self, head: DenoisingHead, output: Tensor, noisy: Tensor, gamma: Tensor) -> Tensor:
        """Estimate x⁰ `[b, q, d]`."""
        process = self.density.process
        predicts_noise = process.predicts == "noise"
        if predicts_noise:
            gamma = gamma.clamp(min=_SMALLEST_GAMMA)
        guess = head.decode(output, with_gamma(noisy, gamma)).float()
        if predicts_noise:
            guess = clean_from_noise(noisy, guess, gamma)
        return guess if process.value_range is None else guess.clamp(*process.value_range)


def with_gamma(noisy: Tensor, gamma: Tensor) -> Tensor:
    """Put γ `[b, s, 1]` behind noisy patches `[b, s, d]`."""
    return torch.cat([noisy, gamma], dim=-1)
