"""How one real-valued token is drawn from the density that GIVT predicts for it.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.4: variance scaling, mixture
temperature and density-based classifier-free guidance. Every draw is a function of seed, image and
purpose, so no layout can change it.

Legend: m tokens, d numbers of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.mixture import Distribution, Mixture
from megavis.parallel.random import normal, uniform
from megavis.sampling.guidance import Acceptance, Guided, draw_guided


@dataclass(frozen=True)
class TokenChoice:
    """What is done to a density before a token is drawn from it.

    Raises:
        UserError: when a value is out of its range.
    """

    scale: float = 1.0
    """Multiplies the standard deviations: variance scaling, t of table 1."""
    probability: float = 1.0
    """Multiplies the logits of the components, the released code's `temp_probs`."""
    guidance: float = 0.0
    """w of DB-CFG; 0 does without the prediction for no class."""
    num_beams: int = 1
    """Sequences that beam search keeps of each image; 1 searches nothing."""
    num_fans: int = 1
    """Candidates that it draws for each of them."""

    def __post_init__(self) -> None:
        for name in ("scale", "probability", "guidance"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"--{name} must be 0 or more, not {getattr(self, name)}")
        if min(self.num_beams, self.num_fans) < 1:
            raise UserError("--beams and --fans must be at least 1")
        if self.searches and self.guidance:
            raise UserError(
                "--guidance draws from a density without a scale: use no --beams, --fans"
            )

    @property
    def searches(self) -> bool:
        """True for beam search."""
        return max(self.num_beams, self.num_fans) > 1

    def draw(
        self,
        densities: list[Distribution],
        keys: Tensor,
        *,
        seed: int,
        purpose: str,
        acceptance: Acceptance,
    ) -> tuple[Tensor, Tensor]:
        """Draw a token from each density.

        Args:
            densities: given the class; with guidance also without it. Of m tokens each.
            keys: int64 `[m]`, which with seed and purpose decide the draws.
            seed: decides every draw.
            purpose: what the draws are for.
            acceptance: counts of guidance are added to it.

        Returns:
            Tokens `[m, d]` and their log-likelihood `[m]`; guided without its constant.
        """
        changed = [d.tempered(scale=self.scale, probability=self.probability) for d in densities]
        uniforms = uniform(keys, 1, seed=seed, purpose=f"{purpose}/component")[:, 0]
        if not self.guidance:
            (density,) = changed
            noise = normal(keys, density.token_size, seed=seed, purpose=f"{purpose}/value")
            tokens = density.draw(uniforms, noise)
            return tokens, density.log_prob(tokens)
        guided = self._guide(changed, uniforms)
        size = guided.mean.shape[1]
        numbers = keys[:, None] * size + torch.arange(size, device=keys.device)
        flat = guided.flatten()
        values = draw_guided(
            flat, numbers.flatten(), seed=seed, purpose=purpose, acceptance=acceptance
        )
        return values.view_as(guided.mean), flat.log_density(values).view_as(guided.mean).sum(1)

    def _guide(self, densities: list[Distribution], uniforms: Tensor) -> Guided:
        """Take one component, of the conditional mixture's choosing, out of both mixtures."""
        conditional, other = densities
        if not isinstance(conditional, Mixture) or not isinstance(other, Mixture):
            raise UserError("--guidance wants a mixture: this model's covariance is full")
        index = conditional.choose(uniforms)
        return Guided(*conditional.component(index), *other.component(index), self.guidance)
