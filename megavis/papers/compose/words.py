"""The words of a composition as sections of a config, each with a `kind` and its own keys."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import DecoderConfig
from megavis.config.choices import DecoderKind, OrderKind, ScaleActivation
from megavis.config.data import DataConfig
from megavis.config.schema import Fraction, NonNegative, Positive
from megavis.config.section import Above0, AtLeast0, Section


class PaletteTokens(Section):
    """Palette ids, a token a pixel."""

    kind: Literal["palette"]
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colors of the palette."""

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
    """Side in pixels of the patch of an id."""
    tokenizer: str | None = None
    """Run folder of what makes ids of images and images of ids; ids shards need none to train."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side


class LatentTokens(Section):
    """Latents of a VAE, drawn from its posterior."""

    kind: Literal["latents"]
    channels: Positive = 16
    """Numbers of a latent."""
    patch_size: Positive = 16
    """Side in pixels of the patch of a latent."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; latents shards need none to
    train."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side


class FrameTokens(Section):
    """Frames of a spectrogram, as many as `data.frames` says."""

    kind: Literal["frames"]

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return one row of the frames."""
        return 1, 0 if data.frames is None else data.frames[0]


AnyTokens = FrameTokens | PaletteTokens | PatchTokens | IdTokens | LatentTokens


class OneByOneSchedule(Section):
    """One token after the other."""

    kind: Literal["one_by_one"]
    order: OrderKind = "raster"
    """The order of the tokens; `random`: one for each image."""
    order_block: Positive = 2
    """Side of a block in tokens, for `nested_raster` and `round_robin`."""
    prefix: NonNegative = 0
    """Tokens, first in the order, that are given: they see each other, and none is predicted."""


class MaskedSchedule(Section):
    """Each token hidden with the same probability."""

    kind: Literal["masked"]
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """That probability."""


class RoundsSchedule(Section):
    """A share of the tokens hidden, drawn for each image; drawn in rounds, as MaskGIT does."""

    kind: Literal["rounds"]
    least_masking: Fraction = 0.0
    """The share is cos(π/2 · u), u uniform in [0, 1 - this)."""


class GroupsSchedule(Section):
    """Group after group, each image in an order of its own."""

    kind: Literal["groups"]
    length: Literal["fixed", "random", "mixed"] = "random"
    """How groups are cut."""
    num_groups: Positive = 20
    """Groups that are predicted; the one before them is given."""


class ContextSchedule(Section):
    """A random share of the tokens is seen by all."""

    kind: Literal["context"]
    mask_ratio: Fraction = 0.75
    """Share of the tokens that is not seen."""


AnySchedule = ContextSchedule | OneByOneSchedule | MaskedSchedule | RoundsSchedule | GroupsSchedule


class ShiftAsking(Section):
    """A row holds the token before the one that it predicts."""

    kind: Literal["shift"]
    place: Literal["asked", "content", "both"] = "asked"
    """Whose position a row has: that of the token that it predicts, of the one that it holds, or
    both, each from a table of its own."""


class MaskAsking(Section):
    """A row for each token, with a filler where one is hidden."""

    kind: Literal["mask"]
    filler: Literal["vector", "zeros"] = "vector"
    """In place of a hidden token: a learned vector, or nothing."""


class QueryAsking(Section):
    """Rows without a token ask for what is predicted; no row attends to them."""

    kind: Literal["query"]


class SelfAsking(Section):
    """A row for each token, which asks for its position."""

    kind: Literal["self"]
    class_token: bool = True
    """A learned token in front, which all see."""
    given_ratio: Fraction = 0.0
    """Share of the tokens, all seen, whose positions are given; `model.positions` says how."""


class BridgeAsking(Section):
    """The blocks see known tokens alone; fillers join at a bridge to a second stack."""

    kind: Literal["bridge"]
    class_token: bool = True
    """A learned token in front."""
    decoder: DecoderConfig = DecoderConfig()
    """The second stack."""


AnyAsking = SelfAsking | BridgeAsking | ShiftAsking | MaskAsking | QueryAsking


class CategoricalDensity(Section):
    """A logit for each id."""

    kind: Literal["categorical"]


class SquaredErrorDensity(Section):
    """A Gaussian of unit variance."""

    kind: Literal["squared_error"]
    normalize: bool = False
    """Standardise each target by its own mean and deviation; nothing can be drawn then."""


class MixtureDensity(Section):
    """A mixture of Gaussians with diagonal covariances."""

    kind: Literal["mixture"]
    num_components: Positive = 16
    """Gaussians of the mixture."""
    scale_activation: ScaleActivation = "squareplus"
    """From an output to a scale."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Deviation of the last matrix at the start."""


class DiffusionDensity(Section):
    """A decoder that takes noise from a token."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset({"sampling_steps", "sampling_temperature"})

    kind: Literal["diffusion"]
    decoder: DecoderKind = "transformer"
    """What reads the backbone's output and the noisy token."""
    decoder_layers: Positive = 1
    """Its layers; `linear` has none."""
    noise_a: Above0 = 0.03
    """a of γ ~ Beta(a, b), the share of the signal's power."""
    noise_b: Above0 = 1.0
    """b of it."""
    predicts: Literal["clean", "noise"] = "clean"
    """The token, or the noise that was added."""
    condition_on_gamma: bool = False
    """The decoder knows γ."""
    sampling_steps: Positive = 1000
    """From noise to a token."""
    sampling_temperature: AtLeast0 = 1.0
    """Multiplies the noise of each step."""


class PlaceDensity(Section):
    """A logit for each place that a token may have come from."""

    kind: Literal["place"]


AnyDensity = (
    PlaceDensity | CategoricalDensity | SquaredErrorDensity | MixtureDensity | DiffusionDensity
)


class NoCondition(Section):
    """Nothing."""

    kind: Literal["none"]


class ClassCondition(Section):
    """The class of the image."""

    kind: Literal["class"]
    num_classes: Positive
    """Classes of the labels."""
    dropout: Fraction = 0.1
    """Probability that training shows no class; 0: guidance and features are refused."""


class FeaturesCondition(Section):
    """The mean over the image of what a frozen tokenizer looks up, as a row in front."""

    kind: Literal["features"]
    tokenizer: str
    """Run folder of the tokenizer."""
    feature_size: Positive
    """Numbers of a feature."""


class MemoryCondition(Section):
    """An image that an encoder reads, to which the blocks attend: of pairs shards the first one."""

    kind: Literal["memory"]
    num_layers: Positive = 8
    """Blocks of the encoder."""
    patch_size: Positive = 16
    """Side in pixels of the patches that it reads."""
    hidden_size: Positive | None = None
    """Its width; that of `model` when absent."""
    num_attention_heads: Positive | None = None
    """Its attention heads; those of `model` when absent."""


AnyCondition = FeaturesCondition | MemoryCondition | NoCondition | ClassCondition


class NoTransform(Section):
    """Tokens are predicted as the tokenizer gives them."""

    kind: Literal["none"]


class AdapterTransform(Section):
    """An invertible map of latents that is learned with the model."""

    kind: Literal["adapter"]
    blocks: Positive = 8
    """Coupling blocks."""
    bottleneck: Positive | None = None
    """Hidden channels of each; 4 · numbers of a latent when absent."""


AnyTransform = NoTransform | AdapterTransform
