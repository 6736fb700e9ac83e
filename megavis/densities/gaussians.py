"""Gaussians over real-valued tokens: a mixture with diagonal covariances, or one with a full one.

"GIVT: Generative Infinite-Vocabulary Transformers", sections 3.2 and 3.4: variance scaling, mixture
temperature and density-based classifier-free guidance.

Legend: b images, q positions, r rows, m tokens to draw, d numbers of a token, k components.

Density-based classifier-free guidance: draws from p(z | c)^(1+w) · p(z | ∅)^-w.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.4 and appendix D. Of a mixture, the
component is drawn from the conditional prediction; its Gaussians with and without the class are
then guided number by number, by rejection: proposals from N(μ_c, 2 · max(σ_c, σ_u)), a bound taken
over 1001 points in μ_c ± 10, at most 1000 tries, and where none is accepted a draw from the
conditional Gaussian.

Legend: m numbers to draw, all independent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.density import Density, Drawing, Drawn, Draws, for_each_key
from megavis.model.gaussian_mixture import (
    Distribution,
    FullGaussian,
    Mixture,
    ScaleForm,
    gaussian_log_prob,
)
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.parallel.random import normal, uniform

Predictions = Tensor | tuple[Tensor, Tensor]
"""Parameters `[b, q, num_outputs]`; with a learned transform in front of the model also the tokens
`[b, q, d]` that it gave, which are scored in place of the targets."""


def _check_range(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise UserError(f"the {name} must be 0 or more, not {value}")


@dataclass(frozen=True)
class GaussianOptions:
    """What is done to a Gaussian before a token is drawn from it.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 1.0
    """Multiplies the standard deviations, 0 or more: variance scaling, t of table 1."""

    def __post_init__(self) -> None:
        _check_range(temperature=self.temperature)


@dataclass(frozen=True)
class MixtureOptions(GaussianOptions):
    """What is done to a mixture before a token is drawn from it."""

    probability: float = 1.0
    """Multiplies the logits of the components, the released code's `temp_probs`."""
    guidance: float = 0.0
    """w of DB-CFG; 0 does without the prediction for no class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(probability=self.probability, guidance=self.guidance)


class Gaussians(Density):
    """What both forms have in common; parameters are read in float32."""

    def __init__(
        self, num_outputs: int, form: ScaleForm, *, build_head: Callable[[], Head]
    ) -> None:
        """Build.

        Args:
            num_outputs: parameters of a token's density.
            form: from outputs to scales.
            build_head: the last layer, which gives `Predictions`.
        """
        self.num_outputs, self.form, self._build = num_outputs, form, build_head

    def build_head(self) -> Head:
        """Return the last layer."""
        return self._build()

    @abstractmethod
    def distribution(self, parameters: Tensor) -> Distribution:
        """Return the densities whose parameters these are, `[..., num_outputs]`."""

    def per_token_loss(self, predictions: Predictions, targets: Tensor | None) -> Tensor:
        """Return -log p of each token, nats `[b, q]` (equation 2).

        Args:
            predictions: as the head gives them.
            targets: tokens `[b, q, d]`; None where the predictions hold them.
        """
        tokens = targets if isinstance(predictions, Tensor) else predictions[1]
        assert tokens is not None
        return -self.distribution(parameters_of(predictions)).log_prob(tokens)

    def restored(self, predictions: Predictions, targets: Tensor) -> Tensor:
        """Return the means of the densities."""
        return self.distribution(parameters_of(predictions)).mean

    def outputs(self, predictions: Predictions) -> Tensor:
        """Return the parameters `[b, q, ...]`, followed by a learned transform's tokens."""
        if isinstance(predictions, Tensor):
            return predictions
        return torch.cat([predictions[0].float(), predictions[1].float()], dim=-1)


class GaussianMixture(Gaussians):
    """k Gaussians with diagonal covariance."""

    options_type = MixtureOptions

    def __init__(
        self,
        num_outputs: int,
        form: ScaleForm,
        *,
        num_components: int,
        build_head: Callable[[], Head],
    ) -> None:
        """Build; `num_components` is k, the rest as `Gaussians` has it."""
        super().__init__(num_outputs, form, build_head=build_head)
        self.num_components = num_components

    def distribution(self, parameters: Tensor) -> Mixture:
        """See `Gaussians`."""
        return Mixture.from_outputs(parameters, self.num_components, self.form)

    def drawing(self, options: MixtureOptions, *, scored: bool) -> Drawing:
        """Return what draws tokens, guided or not."""
        if options.guidance:
            return _DrawsGuided(self, options)
        return _DrawsTokens(self, options.temperature, options.probability, scored)


class CorrelatedGaussian(Gaussians):
    """One Gaussian with a full covariance (appendix C.1)."""

    options_type = GaussianOptions

    def distribution(self, parameters: Tensor) -> FullGaussian:
        """See `Gaussians`."""
        return FullGaussian.from_outputs(parameters, self.form)

    def drawing(self, options: GaussianOptions, *, scored: bool) -> Drawing:
        """Return what draws tokens."""
        return _DrawsTokens(self, options.temperature, 1.0, scored)


@dataclass(frozen=True)
class _DrawsTokens(Drawing):
    density: Gaussians
    temperature: float
    probability: float
    scored: bool

    def __call__(self, head: nn.Module, state: PackedState, draws: Draws) -> Drawn:
        shape = draws.keys.shape
        parameters = parameters_of(head(state))[:, -shape[1] :]
        density = self.density.distribution(for_each_key(parameters, draws).flatten(0, 1))
        density = density.tempered(scale=self.temperature, probability=self.probability)
        component = draws.uniform(f"{draws.name}/component")[:, 0]
        noise = draws.normal(f"{draws.name}/value", density.token_size)
        tokens = density.draw(component, noise)
        score = density.log_prob(tokens).view(shape) if self.scored else None
        return Drawn(tokens.view(*shape, -1), score)


@dataclass(frozen=True)
class _DrawsGuided(Drawing):
    """DB-CFG: the first half of the rows knows the condition, the second half does not."""

    density: GaussianMixture
    choice: MixtureOptions

    num_lanes = 2

    def __call__(self, head: nn.Module, state: PackedState, draws: Draws) -> Drawn:
        shape = draws.keys.shape
        parameters = parameters_of(head(state))[:, -shape[1] :]
        halves = [for_each_key(half, draws).flatten(0, 1) for half in parameters.chunk(2)]
        flat = self._guide(halves, draws).flatten()
        size = flat.mean.numel() // draws.num_tokens
        numbers = draws.keys.flatten()[:, None] * size
        numbers = numbers + torch.arange(size, device=numbers.device)
        values, counts = draw_guided(flat, numbers.flatten(), seed=draws.seed, purpose=draws.name)
        score = flat.log_density(values).view(*shape, size).sum(-1)
        return Drawn(values.view(*shape, size), score, counts)

    def _guide(self, halves: list[Tensor], draws: Draws) -> Guided:
        """Take one component, of the conditional mixture's choosing, out of both mixtures."""
        choice = self.choice
        conditional, other = (
            self.density.distribution(half).tempered(
                scale=choice.temperature, probability=choice.probability
            )
            for half in halves
        )
        index = conditional.choose(draws.uniform(f"{draws.name}/component")[:, 0])
        return Guided(*conditional.component(index), *other.component(index), choice.guidance)


def parameters_of(predictions: Predictions) -> Tensor:
    """Return the parameters `[b, q, ...]` among a head's predictions."""
    return predictions if isinstance(predictions, Tensor) else predictions[0]


_REACH, _NUM_POINTS = 10.0, 1001
# Most numbers are found at once; for the few that are not, a round costs more than its tries, of
# which there are 1000 in all.
_ROUNDS = (16, 64, 256, 664)


@dataclass(frozen=True)
class Guided:
    """The unnormalised guided density of independent numbers.

    Attributes:
        mean: μ_c, `[...]`.
        log_scale: log σ_c, `[...]`.
        other_mean: μ_u of the prediction without the class, `[...]`.
        other_log_scale: log σ_u, `[...]`.
        weight: w, 0 or more; at 0 the conditional Gaussian is left.
    """

    mean: Tensor
    log_scale: Tensor
    other_mean: Tensor
    other_log_scale: Tensor
    weight: float

    def log_density(self, values: Tensor) -> Tensor:
        """Return (1 + w) log p(z | c) - w log p(z | ∅) at `values` `[...]`: float32 `[...]`."""
        conditional = gaussian_log_prob(values, self.mean, self.log_scale)
        other = gaussian_log_prob(values, self.other_mean, self.other_log_scale)
        return (1.0 + self.weight) * conditional - self.weight * other

    @property
    def proposal_log_scale(self) -> Tensor:
        """Logarithm of the proposal's scale, twice the larger of the two."""
        return torch.maximum(self.log_scale, self.other_log_scale) + math.log(2.0)

    def log_bound(self) -> Tensor:
        """Return log of max over the points of the density, divided by the proposal's mode.

        The log-density is a parabola. Over evenly spaced points its largest value is at one of
        the two next to the vertex, or at an end, so four points give the maximum over all 1001.
        """
        sharpness = (1.0 + self.weight) * torch.exp(-2.0 * self.log_scale)
        other = self.weight * torch.exp(-2.0 * self.other_log_scale)
        # Where the parabola has no top, its vertex is of no interest and an end is the largest.
        shift = other * (self.mean - self.other_mean) / (sharpness - other)
        step = 2.0 * _REACH / (_NUM_POINTS - 1)
        nearest = torch.floor(shift.nan_to_num(nan=0.0) / step)
        offsets = [nearest * step, (nearest + 1.0) * step]
        offsets += [torch.full_like(shift, -_REACH), torch.full_like(shift, _REACH)]
        points = torch.stack([o.clamp(-_REACH, _REACH) for o in offsets]) + self.mean
        highest = self.log_density(points).amax(0)
        return highest + self.proposal_log_scale + 0.5 * math.log(2.0 * math.pi)

    def select(self, rows: Tensor) -> Guided:
        """Return the densities of some of m numbers."""
        return self._map(lambda part: part[rows])

    def flatten(self) -> Guided:
        """Return the same with all dimensions in one."""
        return self._map(Tensor.flatten)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Guided:
        parts = (self.mean, self.log_scale, self.other_mean, self.other_log_scale)
        mean, log_scale, other_mean, other_log_scale = map(change, parts)
        return Guided(mean, log_scale, other_mean, other_log_scale, self.weight)


def draw_guided(guided: Guided, keys: Tensor, *, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Draw one value of each guided density.

    The tries are made in a few rounds: on a CPU for those numbers alone that have none yet, on a
    GPU for all, since to know which have none would wait for the device. Values are the same.

    Args:
        guided: of m numbers, `[m]` each.
        keys: int64 `[m]`, which with `seed` and `purpose` decide the draw of each number.
        seed: decides every draw.
        purpose: what the draw is for.

    Returns:
        Values float32 `[m]`; and how rejection fared, int64 `[3]`: numbers wanted, numbers for
        which a proposal was accepted, proposals.
    """
    fallback = normal(keys, 1, seed=seed, purpose=f"{purpose}/fallback")[:, 0]
    values = guided.mean + guided.log_scale.exp() * fallback
    log_bound = guided.log_bound()
    counts = keys.new_zeros(3)
    counts[0] = len(keys)
    if keys.is_cuda:
        return _draw_for_all(guided, keys, values, counts, seed=seed, purpose=purpose)
    waiting = torch.arange(len(keys), device=keys.device)
    for tries in _ROUNDS:
        if not len(waiting):
            break
        part, name = guided.select(waiting), f"{purpose}/{tries}"
        noise = normal(keys[waiting], tries, seed=seed, purpose=f"{name}/value")
        heights = uniform(keys[waiting], tries, seed=seed, purpose=f"{name}/height")
        accepted, proposals = _try(part, log_bound[waiting], noise.t(), heights.t())
        hit, place = accepted.max(dim=0)
        values[waiting[hit]] = proposals.gather(0, place[None])[0][hit]
        tried = torch.where(hit, place + 1, tries)
        counts += torch.stack([counts.new_zeros(()), hit.sum(), tried.sum()])
        waiting = waiting[~hit]
    return values, counts


def _draw_for_all(
    guided: Guided, keys: Tensor, values: Tensor, counts: Tensor, *, seed: int, purpose: str
) -> tuple[Tensor, Tensor]:
    """Replace `values` `[m]` by accepted proposals, and count; nothing is read by the host."""
    log_bound = guided.log_bound()
    is_found = torch.zeros_like(keys, dtype=torch.bool)
    for tries in _ROUNDS:
        name = f"{purpose}/{tries}"
        noise = normal(keys, tries, seed=seed, purpose=f"{name}/value")
        heights = uniform(keys, tries, seed=seed, purpose=f"{name}/height")
        accepted, proposals = _try(guided, log_bound, noise.t(), heights.t())
        hit, place = accepted.max(dim=0)
        is_new = hit & ~is_found
        values = torch.where(is_new, proposals.gather(0, place[None])[0], values)
        tried = torch.where(hit, place + 1, tries).masked_fill(is_found, 0)
        counts[1] += is_new.sum()
        counts[2] += tried.sum()
        is_found = is_found | hit
    return values, counts


def _try(
    guided: Guided, log_bound: Tensor, noise: Tensor, heights: Tensor
) -> tuple[Tensor, Tensor]:
    """Propose; returns which proposals `[tries, m]` are accepted, and the proposals."""
    log_scale = guided.proposal_log_scale
    proposals = guided.mean + log_scale.exp() * noise
    ceiling = log_bound + gaussian_log_prob(proposals, guided.mean, log_scale)
    # A height of 0 is below every density.
    accepted = heights.log() + ceiling < guided.log_density(proposals)
    return accepted, proposals
