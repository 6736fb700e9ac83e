"""Config sections of a composition's choices, each with a `kind` and its own keys."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import DecoderConfig
from megavis.config.schema import Fraction, NonNegative, Positive
from megavis.config.section import (
    Above0,
    AtLeast0,
    DataConfig,
    DecoderKind,
    LossAverage,
    OrderKind,
    ScaleActivation,
    Section,
)


class PaletteTokens(Section):
    """Palette ids, one per pixel."""

    kind: Literal["palette"]
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        return data.image_size, data.image_size


class PatchTokens(Section):
    """Square patches of standardised pixels."""

    kind: Literal["patches"]
    patch_size: Positive = 16
    """Side of a patch in pixels."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side


class IdTokens(Section):
    """Ids of a trained codebook."""

    kind: Literal["ids"]
    vocabulary_size: Annotated[int, Field(gt=1)]
    """Entries of the codebook."""
    patch_size: Positive = 16
    """Side in pixels of the patch that an id represents."""
    tokenizer: str | None = None
    """Run folder of the tokenizer, which encodes images and decodes samples; training on ids shards
    needs none."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side


class LatentTokens(Section):
    """Latents of a VAE, drawn from its posterior."""

    kind: Literal["latents"]
    channels: Positive = 16
    """Channels of a latent."""
    patch_size: Positive = 16
    """Side in pixels of the patch that a latent represents."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; training on latents shards
    needs none."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side


class FrameTokens(Section):
    """Frames of a spectrogram, of the shape in `data.frames`."""

    kind: Literal["frames"]

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return 1 and the number of frames."""
        return 1, 0 if data.frames is None else data.frames[0]


AnyTokens = FrameTokens | PaletteTokens | PatchTokens | IdTokens | LatentTokens


class OneByOneSchedule(Section):
    """Predict one token at a time."""

    kind: Literal["one_by_one"]
    order: OrderKind = "raster"
    """Order of the tokens; `random` draws one for each image."""
    order_block: Positive = 2
    """Side of a block in tokens, for `nested_raster` and `round_robin`."""
    prefix: NonNegative = 0
    """Number of tokens, the first in the order, that are given: they attend to each other, and none
    is predicted."""


class MaskedSchedule(Section):
    """Hide each token with the same probability."""

    kind: Literal["masked"]
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Probability that a token is hidden."""


class RoundsSchedule(Section):
    """Hide a share of the tokens drawn for each image, and generate in rounds, as in MaskGIT."""

    kind: Literal["rounds"]
    least_masking: Fraction = 0.0
    """The hidden share is cos(π/2 · u) with u uniform in [0, 1 - least_masking)."""
    loss_average: LossAverage = "batch"
    """`batch`: all hidden tokens of a step weigh the same in the loss; `images`: all images do."""


class GroupsSchedule(Section):
    """Predict group by group, with a random order for each image."""

    kind: Literal["groups"]
    length: Literal["fixed", "random", "mixed"] = "random"
    """How the sequence is cut into groups."""
    num_groups: Positive = 20
    """Number of predicted groups; one more, the first, is given."""


class ContextSchedule(Section):
    """All tokens attend to a random share of the tokens, the context."""

    kind: Literal["context"]
    mask_ratio: Fraction = 0.75
    """Share of the tokens outside the context."""


AnySchedule = ContextSchedule | OneByOneSchedule | MaskedSchedule | RoundsSchedule | GroupsSchedule


class ShiftAsking(Section):
    """A row holds the token before the one that it predicts."""

    kind: Literal["shift"]
    place: Literal["asked", "content", "both"] = "asked"
    """Which position is added to a row: that of the token that it predicts (`asked`), of the token
    that it holds (`content`), or both, from separate tables."""


class MaskAsking(Section):
    """One row per token, with a mask token for hidden ones."""

    kind: Literal["mask"]
    filler: Literal["vector", "zero_embedding", "zero_token"] = "vector"
    """What stands for a hidden token: a learned `vector`, a `zero_embedding`, or the embedding of a
    `zero_token`, which ids do not have."""


class QueryAsking(Section):
    """Query rows without a token predict the tokens; no row attends to them."""

    kind: Literal["query"]


class SelfAsking(Section):
    """One row per token, which predicts that token's position."""

    kind: Literal["self"]
    class_token: bool = True
    """Prepend a learned token, to which all attend."""
    given_ratio: Fraction = 0.0
    """Share of the tokens, within the context, whose positions are given, as `model.positions`."""


class BridgeAsking(Section):
    """An encoder sees only known tokens; a bridge to a decoder adds mask tokens for the others."""

    kind: Literal["bridge"]
    class_token: bool = True
    """Prepend a learned token."""
    decoder: DecoderConfig = DecoderConfig()
    """The decoder."""


AnyAsking = SelfAsking | BridgeAsking | ShiftAsking | MaskAsking | QueryAsking


class CategoricalDensity(Section):
    """Logits over the vocabulary."""

    kind: Literal["categorical"]


class SquaredErrorDensity(Section):
    """Squared error, as of a Gaussian with unit variance."""

    kind: Literal["squared_error"]
    normalize: bool = False
    """Standardise each target by its own mean and standard deviation; disables generation."""


class MixtureDensity(Section):
    """A mixture of Gaussians with diagonal covariances."""

    kind: Literal["mixture"]
    num_components: Positive = 16
    """Components of the mixture."""
    scale_activation: ScaleActivation = "squareplus"
    """Maps outputs to scales."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix."""


class DiffusionDensity(Section):
    """A decoder that denoises tokens."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset({"sampling_steps", "sampling_temperature"})

    kind: Literal["diffusion"]
    decoder: DecoderKind = "transformer"
    """Decoder of the backbone's output and the noisy token."""
    decoder_layers: Positive = 1
    """Layers of the decoder; ignored by `linear`."""
    noise_a: Above0 = 0.03
    """a of γ ~ Beta(a, b), the signal's share of the power."""
    noise_b: Above0 = 1.0
    """b of γ ~ Beta(a, b)."""
    predicts: Literal["clean", "noise"] = "clean"
    """Predict the clean token, or the noise."""
    condition_on_gamma: bool = False
    """Condition the decoder on γ."""
    sampling_steps: Positive = 1000
    """Denoising steps."""
    sampling_temperature: AtLeast0 = 1.0
    """Multiplies the noise of each step."""


class PlaceDensity(Section):
    """Logits over the positions that a token may have."""

    kind: Literal["place"]


AnyDensity = (
    PlaceDensity | CategoricalDensity | SquaredErrorDensity | MixtureDensity | DiffusionDensity
)


class NoCondition(Section):
    """No condition."""

    kind: Literal["none"]


class ClassCondition(Section):
    """The class of the image."""

    kind: Literal["class"]
    num_classes: Positive
    """Number of classes."""
    dropout: Fraction = 0.1
    """Probability of the null label in training; 0 disables guidance and features."""


class FeaturesCondition(Section):
    """Features of a frozen tokenizer, averaged over the image, as a row in front."""

    kind: Literal["features"]
    tokenizer: str
    """Run folder of the tokenizer."""
    feature_size: Positive
    """Channels of the features."""


class MemoryCondition(Section):
    """Cross-attention to an encoder of an image; with pairs shards, of the first image."""

    kind: Literal["memory"]
    num_layers: Positive = 8
    """Blocks of the encoder."""
    patch_size: Positive = 16
    """Side of the encoder's patches in pixels."""
    hidden_size: Positive | None = None
    """Width of the encoder; defaults to that of `model`."""
    num_attention_heads: Positive | None = None
    """Attention heads of the encoder; defaults to those of `model`."""


AnyCondition = FeaturesCondition | MemoryCondition | NoCondition | ClassCondition


class NoTransform(Section):
    """No transform."""

    kind: Literal["none"]


class AdapterTransform(Section):
    """An invertible map of latents, trained with the model."""

    kind: Literal["adapter"]
    blocks: Positive = 8
    """Coupling blocks."""
    bottleneck: Positive | None = None
    """Hidden channels; defaults to 4 · channels of a latent."""


AnyTransform = NoTransform | AdapterTransform
