"""Gaussians over real-valued tokens: a mixture with diagonal covariances, or one with a full one.

"GIVT: Generative Infinite-Vocabulary Transformers", sections 3.2 and 3.4: variance scaling, mixture
temperature and density-based classifier-free guidance.

Legend: b images, q positions, r rows, m tokens to draw, d numbers of a token, k components.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.base import Density, Drawing, Drawn, Draws, for_each_key
from megavis.densities.guidance import Guided, draw_guided
from megavis.model.gaussian_mixture import Distribution, FullGaussian, Mixture, ScaleForm
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState

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
