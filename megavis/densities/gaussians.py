"""Gaussian densities of real-valued tokens: a diagonal mixture, or one full-covariance Gaussian.

"GIVT: Generative Infinite-Vocabulary Transformers", sections 3.2 and 3.4: variance scaling, mixture
temperature and density-based classifier-free guidance (DB-CFG), which samples from
p(z | c)^(1+w) · p(z | ∅)^-w (appendix D). The mixture component is drawn from the conditional
prediction. Its Gaussians with and without the class are then guided per dimension by rejection
sampling: proposals from N(μ_c, 2 · max(σ_c, σ_u)) as in figure 11 (section 3.4 has 2σ_c), a bound
taken over 1001 points in μ_c ± 10, at most 1000 tries, and a draw from the conditional Gaussian if
none is accepted.

Legend: b images, q positions, r rows, d values of a token, k components, m independent values to
sample.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from megavis.densities.density import (
    Density,
    Samples,
    SamplingKeys,
    TokenSampler,
    check_not_negative,
    for_each_key,
)
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
"""Parameters `[b, q, num_outputs]`; with a learned transform in front of the model, also the
transform's output `[b, q, d]`, which is scored instead of the targets."""
_REACH, _NUM_POINTS = 10.0, 1001
"""The bound of rejection sampling is taken over this many points, at most 10 from the mean."""
# Tries of rejection sampling per round, 1000 in total. Most values are accepted in the first round;
# for the rest, the overhead of a round exceeds the cost of its tries.
_ROUNDS = (16, 64, 256, 664)
_VALUES_AT_ONCE = 2**14
"""On a GPU: the last round draws 1328 integers of 8 bytes for each."""


@dataclass(frozen=True)
class GaussianOptions:
    """Sampling options of a Gaussian. Raises UserError: a value is out of range."""

    temperature: float = 1.0
    """Multiplies the standard deviations, 0 or more: variance scaling, t in table 1."""

    def __post_init__(self) -> None:
        check_not_negative(temperature=self.temperature)


@dataclass(frozen=True)
class MixtureOptions(GaussianOptions):
    """Sampling options of a mixture."""

    probability: float = 1.0
    """Multiplies the logits of the components, 0 or more; the released code's `temp_probs`."""
    guidance: float = 0.0
    """w of DB-CFG, 0 or more; 0 skips the unconditional prediction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(probability=self.probability, guidance=self.guidance)


class Gaussians(Density):
    """Base class of both forms; distributions are computed in float32.

    Args:
        build_head: builds the last layer, which returns `Predictions`.
    """

    predicts_tokens = True

    def __init__(
        self, num_outputs: int, form: ScaleForm, *, build_head: Callable[[], Head]
    ) -> None:
        super().__init__(num_outputs, build_head)
        self.form = form

    @abstractmethod
    def distribution(self, parameters: Tensor) -> Distribution:
        """Return the distributions with these parameters, `[..., num_outputs]`."""

    def per_token_loss(self, predictions: Predictions, targets: Tensor | None) -> Tensor:
        """Return -log p of each token in nats, `[b, q]` (equation 2).

        The targets, tokens `[b, q, d]`, are None if the predictions contain them.
        """
        tokens = targets if isinstance(predictions, Tensor) else predictions[1]
        assert tokens is not None
        return -self.distribution(parameters_of(predictions)).log_prob(tokens)

    def restored(self, predictions: Predictions, targets: Tensor) -> Tensor:
        """Return the means of the distributions."""
        return self.distribution(parameters_of(predictions)).mean

    def outputs(self, predictions: Predictions) -> Tensor:
        """Return the parameters `[b, q, ...]`, followed by a learned transform's tokens if any."""
        if isinstance(predictions, Tensor):
            return predictions
        return torch.cat([predictions[0].float(), predictions[1].float()], dim=-1)


class GaussianMixture(Gaussians):
    """`num_components` Gaussians with diagonal covariance."""

    options_type = MixtureOptions

    def __init__(
        self,
        num_outputs: int,
        form: ScaleForm,
        *,
        num_components: int,
        build_head: Callable[[], Head],
    ) -> None:
        super().__init__(num_outputs, form, build_head=build_head)
        self.num_components = num_components

    def distribution(self, parameters: Tensor) -> Mixture:
        """See `Gaussians`."""
        return Mixture.from_outputs(parameters, self.num_components, self.form)

    def token_sampler(self, options: MixtureOptions, *, scored: bool) -> TokenSampler:
        """Return a sampler of tokens, with or without guidance."""
        if options.guidance:
            # Always scored, since it computes the densities anyway; they are unnormalised, so beams
            # cannot compare them.
            return _GuidedSampling(self, options)
        return _GaussianSampling(self, options.temperature, options.probability, scored)


class CorrelatedGaussian(Gaussians):
    """One Gaussian with a full covariance (appendix C.1)."""

    options_type = GaussianOptions

    def distribution(self, parameters: Tensor) -> FullGaussian:
        """See `Gaussians`."""
        return FullGaussian.from_outputs(parameters, self.form)

    def token_sampler(self, options: GaussianOptions, *, scored: bool) -> TokenSampler:
        """Return a sampler of tokens."""
        return _GaussianSampling(self, options.temperature, 1.0, scored)


@dataclass(frozen=True)
class _GaussianSampling(TokenSampler):
    density: Gaussians
    temperature: float
    probability: float
    scored: bool

    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        shape = draws.keys.shape
        parameters = parameters_of(head(state))[:, -shape[1] :]
        density = self.density.distribution(for_each_key(parameters, draws).flatten(0, 1))
        density = density.tempered(scale=self.temperature, probability=self.probability)
        component = draws.uniform("component")
        noise = draws.normal("value", density.token_size)
        tokens = density.draw(component, noise)
        score = density.log_prob(tokens).view(shape) if self.scored else None
        return Samples(tokens.view(*shape, -1), score)


@dataclass(frozen=True)
class _GuidedSampling(TokenSampler):
    """DB-CFG: the first half of the rows is conditional, the second half unconditional."""

    density: GaussianMixture
    choice: MixtureOptions

    @property
    def num_lanes(self) -> int:
        """Two: with and without a class."""
        return 2

    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        shape = draws.keys.shape
        parameters = parameters_of(head(state))[:, -shape[1] :]
        halves = [for_each_key(half, draws).flatten(0, 1) for half in parameters.chunk(2)]
        flat = self._guide(halves, draws).map(Tensor.flatten)
        size = flat.mean.numel() // draws.num_tokens
        numbers = draws.keys.flatten()[:, None] * size
        numbers = numbers + torch.arange(size, device=numbers.device)
        values, counts = draw_guided(
            flat, numbers.flatten(), seed=draws.seed, purpose=draws.purpose
        )
        score = flat.log_density(values).view(*shape, size).sum(-1)
        return Samples(values.view(*shape, size), score, counts)

    def _guide(self, halves: list[Tensor], draws: SamplingKeys) -> Guided:
        """Draw a component from the conditional mixture and take it from both mixtures."""
        choice = self.choice
        conditional, other = (
            self.density.distribution(half).tempered(
                scale=choice.temperature, probability=choice.probability
            )
            for half in halves
        )
        index = conditional.choose(draws.uniform("component"))
        return Guided(*conditional.component(index), *other.component(index), choice.guidance)


def parameters_of(predictions: Predictions) -> Tensor:
    """Return the parameters `[b, q, ...]` of a head's predictions."""
    return predictions if isinstance(predictions, Tensor) else predictions[0]


@dataclass(frozen=True)
class Guided:
    """The unnormalised guided density of independent values.

    Attributes:
        mean: μ_c, `[...]`.
        log_scale: log σ_c, `[...]`.
        other_mean: μ_u of the unconditional prediction, `[...]`.
        other_log_scale: log σ_u, `[...]`.
        weight: w, 0 or more; 0 is the conditional Gaussian.
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
        """Logarithm of the proposal's scale, 2 · max(σ_c, σ_u)."""
        return torch.maximum(self.log_scale, self.other_log_scale) + math.log(2.0)

    def log_bound(self) -> Tensor:
        """Return the log of the density's maximum over the points, divided by the proposal's mode.

        The log-density is a parabola, so over evenly spaced points its maximum is at one of the two
        points next to the vertex or at an end: four points give the maximum over all 1001.
        """
        sharpness = (1.0 + self.weight) * torch.exp(-2.0 * self.log_scale)
        other = self.weight * torch.exp(-2.0 * self.other_log_scale)
        # If the parabola opens upward, the vertex is irrelevant and the maximum is at an end.
        shift = other * (self.mean - self.other_mean) / (sharpness - other)
        step = 2.0 * _REACH / (_NUM_POINTS - 1)
        # A straight line has its vertex at infinity, which is clamped to an end below; for a level
        # one the vertex is NaN, and any point is a maximum.
        nearest = torch.floor(shift.nan_to_num(nan=0.0) / step)
        offsets = [nearest * step, (nearest + 1.0) * step]
        offsets += [torch.full_like(shift, -_REACH), torch.full_like(shift, _REACH)]
        points = torch.stack([o.clamp(-_REACH, _REACH) for o in offsets]) + self.mean
        highest = self.log_density(points).amax(0)
        return highest + self.proposal_log_scale + 0.5 * math.log(2.0 * math.pi)

    def map(self, change: Callable[[Tensor], Tensor]) -> Guided:
        """Apply a function to all parameters, and return the densities."""
        parts = (self.mean, self.log_scale, self.other_mean, self.other_log_scale)
        mean, log_scale, other_mean, other_log_scale = map(change, parts)
        return Guided(mean, log_scale, other_mean, other_log_scale, self.weight)


def draw_guided(guided: Guided, keys: Tensor, *, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Sample one value of each guided density.

    Tries are made in a few rounds: on a CPU only for values not accepted yet, on a GPU for all,
    since selecting them would synchronize with the device. Both give the same values.

    Args:
        guided: densities of m values, `[m]` each.
        keys: int64 `[m]`; each draw is a function of key, seed and purpose.

    Returns:
        Values float32 `[m]`, and counts of the rejection sampling, int64 `[3]`: values requested,
        values for which a proposal was accepted, and proposals.
    """
    # Draw for all values: selecting those that need it would synchronize with the device.
    fallback = normal(keys, 1, seed=seed, purpose=f"{purpose}/fallback")[:, 0]
    values = guided.mean + guided.log_scale.exp() * fallback
    log_bound, is_found = guided.log_bound(), torch.zeros_like(keys, dtype=torch.bool)
    counts = keys.new_zeros(3)
    counts[0] = len(keys)
    for rows in torch.arange(len(keys), device=keys.device).split(_VALUES_AT_ONCE):
        for tries in _ROUNDS:
            # Rounds differ in their number of tries, which therefore names their draws.
            name, waiting = f"{purpose}/{tries}", ~is_found[rows]
            if not keys.is_cuda:
                rows, waiting = rows[waiting], waiting[waiting]
            noise = normal(keys[rows], tries, seed=seed, purpose=f"{name}/value")
            heights = uniform(keys[rows], tries, seed=seed, purpose=f"{name}/height")
            part = guided.map(itemgetter(rows))
            accepted, proposals = _try(part, log_bound[rows], noise.t(), heights.t())
            # `max` returns the first of equal values: the first proposal that is accepted.
            hit, place = accepted.max(dim=0)
            drawn = proposals.gather(0, place[None])[0]
            values[rows] = torch.where(hit & waiting, drawn, values[rows])
            counts[1] += (hit & waiting).sum()
            counts[2] += torch.where(hit, place + 1, tries).masked_fill(~waiting, 0).sum()
            is_found[rows] |= hit
    return values, counts


def _try(
    guided: Guided, log_bound: Tensor, noise: Tensor, heights: Tensor
) -> tuple[Tensor, Tensor]:
    """Make proposals; return which are accepted, bool `[tries, m]`, and the proposals."""
    log_scale = guided.proposal_log_scale
    proposals = guided.mean + log_scale.exp() * noise
    ceiling = log_bound + gaussian_log_prob(proposals, guided.mean, log_scale)
    # log(0) = -inf accepts, as a height of 0 is below every density.
    accepted = heights.log() + ceiling < guided.log_density(proposals)
    return accepted, proposals
