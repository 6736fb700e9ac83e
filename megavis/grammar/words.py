"""The words of a paper: tokens, schedule, asking, density, condition, memory, transform, weights.

Each word is a section of the config. Its `kind` is the name, in snake case, of the class that
`composition/build.py` makes of it. Facts that checks and planning need are here, without torch.

Legend: n tokens of an image, d values of a token, h hidden size.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megavis.config.schema import Fraction, NonNegative, Positive
from megavis.config.section import (
    Above0,
    Activation,
    AtLeast0,
    DataConfig,
    DecoderKind,
    LossAverage,
    ScaleActivation,
    Section,
)
from megavis.grammar.boundaries import Cut, boundary_range, context_size
from megavis.grammar.order import read_order


class TokenWord(Section):
    """A kind of token."""

    kind: str
    is_discrete: ClassVar[bool] = False
    """Whether tokens are ids of a vocabulary, not vectors."""
    made_from_images: ClassVar[bool] = True
    """Whether they can be made of the images in jpeg shards."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens of an image."""
        raise NotImplementedError


class _Squares(TokenWord):
    patch_size: Positive = 16
    """Side in pixels of the square that a token stands for."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return √n and √n."""
        side = data.image_size // self.patch_size
        return side, side


class Colors(TokenWord):
    """Palette ids, one per pixel."""

    is_discrete: ClassVar[bool] = True
    made_from_images: ClassVar[bool] = False

    kind: Literal["colors"]
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return one cell per pixel."""
        return data.image_size, data.image_size


class Patches(_Squares):
    """Square patches of standardised pixels."""

    kind: Literal["patches"]


class Ids(_Squares):
    """Ids of a trained codebook."""

    is_discrete: ClassVar[bool] = True

    kind: Literal["ids"]
    vocabulary_size: Annotated[int, Field(gt=1)]
    """Entries of the codebook."""
    tokenizer: str | None = None
    """Run folder of the tokenizer, which encodes images and decodes samples; training on ids shards
    needs none."""


class Latents(_Squares):
    """Latents of a VAE, drawn from its posterior."""

    kind: Literal["latents"]
    channels: Positive = 16
    """Channels of a latent."""
    stacked: Positive = 1
    """Horizontally adjacent latents in one token."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; training on latents shards
    needs none."""
    tokenizer_beta: AtLeast0 | None = None
    """Required β of the VAE in `tokenizer`, checked against its run's config. None: any."""

    @property
    def width(self) -> int:
        """Values d of a token."""
        return self.channels * self.stacked

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side // self.stacked


class Frames(TokenWord):
    """Frames of a spectrogram, of the shape in `data.frames`."""

    made_from_images: ClassVar[bool] = False

    kind: Literal["frames"]

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return 1 and the number of frames."""
        return 1, 0 if data.frames is None else data.frames[0]


AnyTokens = Frames | Colors | Patches | Ids | Latents


class ScheduleWord(Section):
    """What is known when a token is predicted."""

    kind: str
    generates: ClassVar[bool] = True
    """Whether the schedule has an order of generation."""

    def content(self, count: int) -> tuple[int, int]:
        """Return how many of `count` tokens rows may attend to, and the first predicted position.

        Both bound all images, since sizes must not depend on random draws.
        """
        return count, 0


class OneByOne(ScheduleWord):
    """Predict one token at a time."""

    kind: Literal["one_by_one"]
    order: Annotated[
        str | Annotated[tuple[int, ...], Field(strict=False)], BeforeValidator(read_order)
    ] = "raster"
    """Order of the tokens: `raster`, `nested_raster`, `round_robin`, `random`, or the raster index
    of the token at each position, as a list or a `.npy` file, whose content is copied into the
    run's config."""
    drawn: Literal["image", "run"] = "image"
    """Draw a `random` order for each image, or one for the run."""
    order_block: Positive = 2
    """Side of a block in tokens, for `nested_raster` and `round_robin`."""
    prefix: NonNegative = 0
    """Number of tokens, the first in the order, that are given: they attend to each other, and none
    is predicted."""

    @property
    def differs_by_image(self) -> bool:
        """Whether each image has its own order."""
        return self.order == "random" and self.drawn == "image"

    def content(self, count: int) -> tuple[int, int]:
        """Return all but the last token, and position 0."""
        return count - 1, 0


class Masked(ScheduleWord):
    """Hide each token with the same probability."""

    generates: ClassVar[bool] = False

    kind: Literal["masked"]
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Probability that a token is hidden."""


class Rounds(ScheduleWord):
    """Hide a share of the tokens drawn for each image, and generate in rounds, as in MaskGIT."""

    kind: Literal["rounds"]
    least_masking: Fraction = 0.0
    """The hidden share is cos(π/2 · u) with u uniform in [0, 1 - least_masking)."""
    loss_average: LossAverage = "batch"
    """`batch`: all hidden tokens of a step weigh the same in the loss; `images`: all images do."""


class Groups(ScheduleWord):
    """Predict group by group."""

    kind: Literal["groups"]
    length: Cut = "random"
    """How the sequence is cut into groups; `given` uses `boundaries`."""
    num_groups: Positive = 20
    """Number of predicted groups; one more, the first, is given."""
    boundaries: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """For `given`: the number of tokens up to the end of each group but the last."""
    order: Literal["random", "raster"] = "random"
    """Order of the tokens: drawn for each image, or raster order."""
    feature_order: Literal["raster", "drawn"] = "raster"
    """Order and groups of the tokens for features under the causal mask: raster order with even
    groups up to their mean end in training, without random draws; or drawn as in training."""

    def content(self, count: int) -> tuple[int, int]:
        """Return the largest end of a group, and the smallest end of the given one."""
        first, last = boundary_range(self.length, count, self.num_groups, self.boundaries)
        return last, first


class Context(ScheduleWord):
    """All tokens attend to a random share of the tokens, the context."""

    generates: ClassVar[bool] = False

    kind: Literal["context"]
    mask_ratio: Fraction = 0.75
    """Share of the tokens outside the context."""

    def content(self, count: int) -> tuple[int, int]:
        """Return the size of the context, and position 0."""
        return context_size(count, self.mask_ratio), 0


AnySchedule = Context | OneByOne | Masked | Rounds | Groups


class AskWord(Section):
    """Which row predicts a token."""

    kind: str
    schedules: ClassVar[tuple[str, ...]]
    """Kinds of schedule that fit."""
    has_front: ClassVar[bool] = True
    """Whether a condition can stand in front of all rows."""


class Shift(AskWord):
    """A row holds the token before the one that it predicts; the first one a start token."""

    schedules: ClassVar[tuple[str, ...]] = ("one_by_one",)
    has_front: ClassVar[bool] = False

    kind: Literal["shift"]
    place: Literal["asked", "content", "both"] = "asked"
    """Which position is added to a row: that of the token that it predicts (`asked`), of the token
    that it holds (`content`), or both, from separate tables."""


class Mask(AskWord):
    """One row per token, with a mask token for hidden ones."""

    schedules: ClassVar[tuple[str, ...]] = ("masked", "rounds")

    kind: Literal["mask"]
    filler: Literal["vector", "zero_embedding", "zero_token"] = "vector"
    """What stands for a hidden token: a learned `vector`, a `zero_embedding`, or the embedding of a
    `zero_token`, which ids do not have."""
    marks: bool = False
    """Mark hidden and shown tokens in half of the width, and hold the token in the other half."""


class Query(AskWord):
    """Query rows without a token predict the tokens; no row attends to them."""

    schedules: ClassVar[tuple[str, ...]] = ("one_by_one", "groups")

    kind: Literal["query"]
    start: bool = True
    """Begin with a learned start token."""
    streams: Literal["two", "one"] = "two"
    """With `one` there are no query rows: the row before a token predicts it, without its
    position."""


class InContext(AskWord):
    """One row per token, which predicts that token's position; all attend to the context."""

    schedules: ClassVar[tuple[str, ...]] = ("context",)

    kind: Literal["in_context"]
    given_ratio: Fraction = 0.0
    """Share of the tokens, within the context, whose positions are given, as `model.positions`."""


class DecoderConfig(Section):
    """Blocks on top of an encoder; all other sizes are those of `model`."""

    num_layers: Positive = 8
    """Number of decoder blocks."""
    hidden_size: Positive = 512
    """Width of the decoder, a multiple of 4."""
    num_attention_heads: Positive = 16
    """Attention heads of the decoder."""


class Visible(AskWord):
    """An encoder sees only known tokens; a bridge to a decoder adds mask tokens for the others."""

    schedules: ClassVar[tuple[str, ...]] = ("context",)

    kind: Literal["visible"]
    decoder: DecoderConfig = DecoderConfig()
    """The decoder."""
    tokens_decay: bool = False
    """Apply weight decay to mask token and learned front tokens in pre-training."""


AnyAsking = InContext | Visible | Shift | Mask | Query


class DensityWord(Section):
    """How a token is predicted, scored and sampled."""

    kind: str
    has_likelihood: ClassVar[bool] = False
    """Whether tokens have a log-likelihood."""


class Categorical(DensityWord):
    """Logits over the vocabulary."""

    has_likelihood: ClassVar[bool] = True

    kind: Literal["categorical"]
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the projection to logits."""


class SquaredError(DensityWord):
    """Squared error, as of a Gaussian with unit variance."""

    kind: Literal["squared_error"]
    normalize: bool = False
    """Standardise each target by its own mean and standard deviation; disables generation."""
    decoder: Literal["linear", "mlp"] = "linear"
    """Decoder of the backbone's output."""
    decoder_layers: Positive = 1
    """Layers of the decoder; ignored by `linear`."""


class GaussianMixture(DensityWord):
    """A mixture of Gaussians with diagonal covariances."""

    has_likelihood: ClassVar[bool] = True

    kind: Literal["gaussian_mixture"]
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

    kind: Literal["correlated_gaussian"]
    scale_activation: ScaleActivation = "squareplus"
    """Maps outputs to scales."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix."""


class Diffusion(DensityWord):
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


class Place(DensityWord):
    """Logits over the positions that a token may have."""

    kind: Literal["place"]


AnyDensity = Place | Categorical | SquaredError | GaussianMixture | CorrelatedGaussian | Diffusion


class ConditionWord(Section):
    """What the model is conditioned on: a start token, or rows in front of all others."""

    kind: str

    @property
    def num_front(self) -> int:
        """Rows in front of all others, with an asking that has any."""
        return 1


class LearnedTokens(ConditionWord):
    """Learned tokens in front, such as a class token."""

    kind: Literal["learned_tokens"]
    count: NonNegative = 1
    """Number of tokens."""

    @property
    def num_front(self) -> int:
        """All of them."""
        return self.count


class Labels(ConditionWord):
    """The class of the image: the start token, or a row in front of all others."""

    kind: Literal["labels"]
    num_classes: Positive
    """Number of classes."""
    dropout: Fraction = 0.1
    """Probability of the null label in training; 0 disables guidance and features."""


class PooledFeatures(ConditionWord):
    """Features of a frozen tokenizer, averaged over the image, as a row in front."""

    kind: Literal["pooled_features"]
    tokenizer: str
    """Run folder of the tokenizer."""
    feature_size: Positive
    """Channels of the features."""


AnyCondition = LearnedTokens | PooledFeatures | Labels


class EncodedImage(Section):
    """Cross-attention to an encoder of an image; with pairs shards, of the first image."""

    kind: Literal["encoded_image"]
    num_layers: Positive = 8
    """Blocks of the encoder."""
    patch_size: Positive = 16
    """Side of the encoder's patches in pixels."""
    hidden_size: Positive | None = None
    """Width of the encoder; defaults to that of `model`."""
    num_attention_heads: Positive | None = None
    """Attention heads of the encoder; defaults to those of `model`."""
    activation: Activation | None = None
    """Activation of the encoder's MLPs; defaults to that of `model`."""
    norm_epsilon: Above0 | None = None
    """Added to the variance inside the encoder's norms; defaults to that of `model`."""
    position_std: Above0 | None = None
    """Standard deviation of the encoder's learned positions at initialization; default:
    1/√width."""
    learning_rate_scale: Above0 = 1.0
    """Multiplies the learning rate of the encoder."""
    from_run: str | None = None
    """Run folder of a pretrained Vision Transformer, from whose newest weights the encoder starts:
    a run of `mae`, or one that `megavis import timm` or `vit` has made. The class token is dropped,
    and positions are resized to this run's images."""


class Adapter(Section):
    """An invertible map of latents, trained with the model."""

    kind: Literal["adapter"]
    blocks: Positive = 8
    """Coupling blocks."""
    bottleneck: Positive | None = None
    """Hidden channels; defaults to 4 · values of a token."""


Deviation = Above0 | Literal["width"]
"""A standard deviation; `width`: 1/√h."""


class InitialWeights(Section):
    """Initial values; a number is the standard deviation of a normal distribution."""

    blocks: Above0 | Literal["xavier", "gpt", "lecun"] = "xavier"
    """Matrices of the blocks. `xavier`: all Xavier-uniform, as in MAE's released code. `gpt`: as in
    iGPT's, attention by width and depth and MLPs 0.02. `lecun`: as in GIVT's, LeCun-normal for
    attention and Xavier-uniform for MLPs."""
    vectors: Literal["xavier", "lecun"] = "xavier"
    """The map that embeds real-valued tokens."""
    positions: Deviation = 0.02
    """Learned positions."""
    tokens: Deviation = 0.02
    """Learned tokens: start, query and mask tokens, those in front, and the classes'."""
