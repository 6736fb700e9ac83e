"""Densities: how a token is predicted, scored and sampled."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Positive
from megavis.config.section import Above0, AtLeast0, DenoiserKind, ScaleActivation, Section


class DensityWord(Section):
    """How a token is predicted, scored and sampled."""

    kind: str
    has_likelihood: ClassVar[bool] = False
    """Whether tokens have a log-likelihood."""
    is_noisy: ClassVar[bool] = False
    """Whether the head reads noisy tokens."""

    @property
    def reads_places(self) -> bool:
        """Whether the head reads the places of its rows."""
        return False


class Categorical(DensityWord):
    """Logits over the vocabulary."""

    has_likelihood: ClassVar[bool] = True

    kind: Literal["categorical"] = "categorical"
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the projection to logits."""
    bias: bool = False
    """Add a bias to the logits."""


class SquaredError(DensityWord):
    """Squared error, which models a Gaussian with unit variance."""

    kind: Literal["squared_error"] = "squared_error"
    norm: Literal["l2", "l1"] = "l2"
    """`l2`: squared error; `l1`: absolute error, as in SimMIM (section 3.4), for which the
    prediction is a median."""
    normalize: bool = False
    """Standardise each target by its own mean and standard deviation; disables generation."""
    decoder: Literal["linear", "mlp"] = "linear"
    """Decoder of the backbone's output."""
    decoder_layers: Positive = 1
    """Layers of the decoder; ignored by `linear`."""
    decoder_width: Positive | None = None
    """Width of an `mlp` decoder, entered through a linear map; by default the model's, without the
    map. Hidden layers are four times as wide."""
    decoder_positions: bool = False
    """Add the sin-cos position of each row before an `mlp` decoder."""

    @property
    def reads_places(self) -> bool:
        """As configured."""
        return self.decoder_positions


class GaussianMixture(DensityWord):
    """A mixture of Gaussians with diagonal covariances."""

    has_likelihood: ClassVar[bool] = True

    kind: Literal["gaussian_mixture"] = "gaussian_mixture"
    num_components: Positive = 16
    """Components of the mixture."""
    scale_activation: ScaleActivation = "squareplus"
    """Maps outputs to scales."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix."""


class CorrelatedGaussian(DensityWord):
    """One Gaussian with a full covariance."""

    has_likelihood: ClassVar[bool] = True

    kind: Literal["correlated_gaussian"] = "correlated_gaussian"
    scale_activation: ScaleActivation = "squareplus"
    """Maps outputs to scales."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix."""


class Diffusion(DensityWord):
    """A decoder that denoises tokens."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset(
        {"sampling_steps", "sampling_temperature", "least_signal"}
    )
    is_noisy: ClassVar[bool] = True

    kind: Literal["diffusion"] = "diffusion"
    decoder: DenoiserKind = "transformer"
    """Decoder of the backbone's output and the noisy token. In `modulated_mlp` the output and an
    embedding of the noise level modulate residual MLPs that read the noisy token."""
    decoder_layers: Positive = 1
    """Layers of the decoder; ignored by `linear`."""
    decoder_width: Positive | None = None
    """Width of an `mlp` or `modulated_mlp` decoder, entered through linear maps; by default the
    model's. Hidden layers of an `mlp` are four times as wide; those of a `modulated_mlp` are not.
    """
    decoder_positions: Literal["none", "learned"] = "none"
    """Add a learned position of each row to the backbone's output, before the decoder."""
    noise: Literal["beta", "cosine"] = "beta"
    """Distribution of the noise level γ, the signal's share of the power. `beta`: continuous.
    `cosine`: the `noise_steps` values of a cosine schedule, equally likely."""
    noise_a: Above0 = 0.03
    """With `beta`: a of γ ~ Beta(a, b)."""
    noise_b: Above0 = 1.0
    """With `beta`: b of γ ~ Beta(a, b)."""
    noise_steps: Annotated[int, Field(gt=1)] = 1000
    """With `cosine`: steps from a clean token to noise."""
    noises_per_token: Positive = 1
    """Noisy copies of each token in training, over which the loss is averaged."""
    predicts: Literal["clean", "noise"] = "clean"
    """Predict the clean token, or the noise."""
    learns_variance: bool = False
    """With `cosine`: predict the variance of each step too, trained by the variational bound."""
    condition_on_gamma: bool = False
    """Append γ to the noisy token as a channel, which `modulated_mlp` does not need."""
    sampling_steps: Positive = 1000
    """Denoising steps; with `cosine` at most `noise_steps`, evenly spaced."""
    sampling_temperature: AtLeast0 = 1.0
    """Scales the noise of each sampling step, and with `beta` the initial noise too."""
    least_signal: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """With predicted noise: sampling treats γ as at least this when it estimates the clean token,
    since that divides errors of the noise by √γ."""

    @property
    def reads_places(self) -> bool:
        """Whether there are positions."""
        return self.decoder_positions != "none"


class Place(DensityWord):
    """Logits over the positions that a token may have."""

    kind: Literal["place"] = "place"


AnyDensity = Place | Categorical | SquaredError | GaussianMixture | CorrelatedGaussian | Diffusion
