"""GIVT's distributions of real-valued tokens.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.2 and appendix C.1: a mixture of k
Gaussians with diagonal covariance, or one Gaussian with full covariance. All computations are in
float32 at any model precision, and log-likelihoods are finite for finite inputs.

Legend: ... any leading dimensions, k components, d values of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.config.section import ScaleActivation

_LOG_2_PI = math.log(2.0 * math.pi)
# Far beyond any latent; these keep squares and their gradients within the range of float32.
_FARTHEST = 1e18
_MOST_SCALES_AWAY = 1e15
_LARGEST_LOG_SCALE = 80.0


@dataclass(frozen=True)
class ScaleForm:
    """The map from unbounded outputs to scales.

    Attributes:
        activation: `squareplus`, (x + √(x² + 4)) / 2, in the released code; `softplus` in the paper
            (section 3.2).
        floor: smallest scale; 1e-6 in the released code, 1e-5 in the paper (appendix C.1).
    """

    activation: ScaleActivation = "squareplus"
    floor: float = 1e-6

    def log_scale(self, raw: Tensor) -> Tensor:
        """Return the logarithm of the scale, float32 `[...]`, for outputs `[...]`."""
        if self.activation == "squareplus":
            # (x + √(x² + 4)) / 2 = exp(asinh(x / 2)), without cancellation for negative x.
            log_scale = torch.asinh(raw.float() / 2.0)
            return log_scale.clamp(math.log(self.floor), _LARGEST_LOG_SCALE)
        scale = torch.nn.functional.softplus(raw.float())
        return scale.clamp(self.floor, math.exp(_LARGEST_LOG_SCALE)).log()


@dataclass(frozen=True)
class Mixture:
    """k Gaussians with diagonal covariance for each token.

    Attributes:
        logits: `[..., k]`, unnormalised log-probabilities of the components.
        means: `[..., k, d]`.
        log_scales: `[..., k, d]`, logarithms of the standard deviations.
    """

    logits: Tensor
    means: Tensor
    log_scales: Tensor

    @classmethod
    def from_outputs(cls, outputs: Tensor, num_components: int, form: ScaleForm) -> Mixture:
        """Build from a head's outputs.

        Args:
            outputs: `[..., k + 2 · k · d]`: k logits, then for each component d means and d scales,
                in the order of the released checkpoints.
        """
        wide = outputs.float()
        logits, rest = wide[..., :num_components], wide[..., num_components:]
        means, raw = rest.unflatten(-1, (num_components, 2, -1)).unbind(-2)
        return cls(logits, means, form.log_scale(raw))

    @property
    def token_size(self) -> int:
        """Values d of a token."""
        return self.means.shape[-1]

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture, `[..., d]`."""
        return (self.logits.softmax(-1)[..., None] * self.means).sum(-2)

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Return log p of tokens `[..., d]`, float32 `[...]`, in nats (equation 2)."""
        components = gaussian_log_prob(tokens[..., None, :], self.means, self.log_scales).sum(-1)
        return torch.logsumexp(self.logits.log_softmax(-1) + components, dim=-1)

    def tempered(self, *, scale: float = 1.0, probability: float = 1.0) -> Mixture:
        """Return the mixture with changed temperature, for sampling (section 3.4).

        Args:
            scale: multiplies the standard deviations: variance scaling, t in the paper.
            probability: multiplies the logits of the components; the released code's `temp_probs`.
        """
        # Keep the logarithm finite at scale 0, where samples equal the mean up to rounding.
        log_scales = self.log_scales + math.log(max(scale, 1e-30))
        return Mixture(self.logits * probability, self.means, log_scales)

    def choose(self, uniforms: Tensor) -> Tensor:
        """Sample components with uniform draws `[...]` in [0, 1): int64 `[...]`."""
        # In float64, so that the sum loses no component to rounding.
        cumulative = self.logits.double().softmax(-1).cumsum(-1)
        # Scale by the computed sum, so that a component is always found.
        threshold = uniforms.double()[..., None] * cumulative[..., -1:]
        return (cumulative <= threshold).sum(-1)

    def component(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-scale `[..., d]` of the components int64 `[...]`."""
        shape = (*index.shape, 1, self.means.shape[-1])
        place = index[..., None, None].expand(shape)
        return (
            self.means.gather(-2, place).squeeze(-2),
            self.log_scales.gather(-2, place).squeeze(-2),
        )

    def draw(self, uniforms: Tensor, normals: Tensor) -> Tensor:
        """Sample tokens `[..., d]` with uniform draws `[...]` and standard normals `[..., d]`."""
        mean, log_scale = self.component(self.choose(uniforms))
        return mean + log_scale.exp() * normals


@dataclass(frozen=True)
class FullGaussian:
    """A Gaussian with full covariance L Lᵀ for each token (appendix C.1).

    Attributes:
        mean: `[..., d]`.
        factor: the lower triangular L, `[..., d, d]`.
    """

    mean: Tensor
    factor: Tensor

    @classmethod
    def from_outputs(cls, outputs: Tensor, form: ScaleForm) -> FullGaussian:
        """Build from a head's outputs `[..., d² + d]`: d² entries of the factor, then d means.

        As in the released code, the activation is applied to all entries, not only to the diagonal;
        entries above the diagonal are ignored.
        """
        wide = outputs.float()
        size = math.isqrt(wide.shape[-1])
        raw, mean = wide[..., : size * size], wide[..., size * size :]
        # The floor is for the diagonal alone; this one only keeps the logarithm finite.
        unbounded = ScaleForm(form.activation, floor=1e-38)
        entries = unbounded.log_scale(raw).exp().unflatten(-1, (size, size)).tril()
        floor = form.floor * torch.eye(size, device=wide.device)
        # All entries are positive, so the zeros off the diagonal of `floor` change none.
        return cls(mean, torch.maximum(entries, floor))

    @property
    def token_size(self) -> int:
        """Values d of a token."""
        return self.mean.shape[-1]

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Return log p of tokens `[..., d]`, float32 `[...]`, in nats.

        Solved in float64 for the sake of extreme factors; overflowing distances are clamped.
        """
        difference = _difference(tokens, self.mean).double()[..., None]
        solved = torch.linalg.solve_triangular(self.factor.double(), difference, upper=False)
        # NaN is ∞ - ∞, where the solve has overflowed.
        distance = solved.squeeze(-1).nan_to_num(nan=_MOST_SCALES_AWAY)
        distance = distance.clamp(-_MOST_SCALES_AWAY, _MOST_SCALES_AWAY)
        log_determinant = self.factor.diagonal(dim1=-2, dim2=-1).double().log()
        terms = -0.5 * distance.square() - log_determinant - 0.5 * _LOG_2_PI
        return terms.sum(-1).float()

    def tempered(self, *, scale: float = 1.0, probability: float = 1.0) -> FullGaussian:
        """Return the Gaussian with its factor multiplied by `scale`; see `Mixture.tempered`."""
        return FullGaussian(self.mean, self.factor * scale)

    def draw(self, uniforms: Tensor, normals: Tensor) -> Tensor:
        """Sample tokens `[..., d]` with standard normals `[..., d]`; `uniforms` is ignored."""
        return self.mean + (self.factor @ normals[..., None]).squeeze(-1)


Distribution = Mixture | FullGaussian


def gaussian_log_prob(tokens: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
    """Return log N(token | mean, scale) elementwise, float32, in nats; all are `[..., d]`."""
    away = _difference(tokens, means) * torch.exp(-log_scales)
    away = away.clamp(-_MOST_SCALES_AWAY, _MOST_SCALES_AWAY)
    return -0.5 * away.square() - log_scales - 0.5 * _LOG_2_PI


def _difference(tokens: Tensor, means: Tensor) -> Tensor:
    return (tokens.float() - means).clamp(-_FARTHEST, _FARTHEST)
