"""Config keys of GIVT: those that all forms share, and those of each.

Where paper and released code differ, the docstring of the key says how; defaults are the code's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from megavis.composition.shared_keys import check_adapter, check_encoder, check_tokens
from megavis.config.schema import (
    ConfigIssue,
    Fraction,
    NonNegative,
    ObjectiveConfig,
    Positive,
    RunConfig,
)
from megavis.config.section import Above0, Activation, AtLeast0, LossAverage, ScaleActivation


class LatentTokensConfig(ObjectiveConfig):
    """Config keys of all forms of GIVT."""

    latent_channels: Positive = 16
    """Channels of a latent, d of the VAE."""
    downsampling: Positive = 16
    """Pixels per latent along each side."""
    stacked_latents: Positive = 1
    """Horizontally adjacent latents stacked into one token; 2 for Large at 512² (table 5)."""
    num_classes: NonNegative = 1000
    """Number of classes; 0 trains without labels."""
    label_dropout: Fraction = 0.1
    """Probability of the null label in training; 0: there is no null label, and no guidance. The
    paper does not state it; the released code has 0.1."""
    num_components: Positive = 16
    """k, components of the mixture."""
    covariance: Literal["diagonal", "full"] = "diagonal"
    """`full`: a single Gaussian with full covariance; requires num_components 1."""
    scale_activation: ScaleActivation = "squareplus"
    """Maps outputs to scales: `squareplus` in the released code, `softplus` in the paper."""
    scale_floor: Above0 = 1e-6
    """Smallest scale: 1e-6 in the released code, 1e-5 in the paper (appendix C.1)."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix. It is 0 in the released code, where all
    components are initially equal and only rounding separates them, differently in each layout."""
    adapter_blocks: NonNegative = 0
    """Coupling blocks of the jointly trained adapter; 8 in the paper, 0 for no adapter."""
    adapter_bottleneck: Positive | None = None
    """Hidden channels of the adapter; defaults to 4 · channels of a token, as in the paper. The
    released code has 8 · channels of a token at 512²."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes jpeg shards on the fly and decodes samples."""
    tokenizer_beta: AtLeast0 | None = None
    """Required β of the VAE in `tokenizer`, checked against its run's config. None: any."""

    @property
    def token_size(self) -> int:
        """Channels of a token."""
        return self.latent_channels * self.stacked_latents

    @property
    def num_outputs(self) -> int:
        """Outputs of the head per token."""
        if self.covariance == "full":
            return self.token_size**2 + self.token_size
        return self.num_components * (1 + 2 * self.token_size)

    @property
    def missing_null_label(self) -> str | None:
        """Key of the label dropout if the model has classes but no null label, else None."""
        has_none = self.num_classes > 0 and not self.label_dropout
        return "objective.label_dropout" if has_none else None

    @property
    def no_images(self) -> None:
        """None: all models generate images."""
        return None

    def grid(self, config: RunConfig) -> tuple[int, int]:
        """Return rows and columns of the token grid."""
        side = config.data.image_size // self.downsampling
        return side, side // self.stacked_latents

    def num_places(self, config: RunConfig) -> int:
        """Return the length of the blocks' input sequence."""
        height, width = self.grid(config)
        return height * width

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that sizes divide, and that keys are compatible."""
        side, rest = divmod(config.data.image_size, self.downsampling)
        if rest or not side:
            text = f"{config.data.image_size} is not divisible by objective.downsampling"
            yield "data.image_size", f"{text} {self.downsampling}"
        if side % self.stacked_latents:
            text = f"{self.stacked_latents} does not divide the {side} latents of a row"
            yield "objective.stacked_latents", text
        if self.covariance == "full" and self.num_components != 1:
            text = f"{self.num_components} Gaussians cannot have a full covariance; use 1"
            yield "objective.num_components", text
        if self.tokenizer_beta is not None and self.tokenizer is None:
            yield "objective.tokenizer_beta", "needs objective.tokenizer, the run of that VAE"
        if self.adapter_blocks:
            yield from check_adapter(
                self.token_size,
                self.adapter_bottleneck,
                blocks_key="objective.adapter_blocks",
                bottleneck_key="objective.adapter_bottleneck",
            )
        places = self.num_places(config)
        yield from check_tokens(config, places, what=f"{places} places")


class GIVTConfig(LatentTokensConfig):
    """GIVT-Causal."""

    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.9, 4.3)

    name: Literal["givt"] = "givt"


class MaskGITConfig(LatentTokensConfig):
    """Config keys of GIVT-MaskGIT."""

    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.6, 5.1)

    name: Literal["givt_maskgit"] = "givt_maskgit"
    masked_input: Literal["vector", "zeros"] = "vector"
    """Embedding of a masked token: a learned vector in the released code, the embedding of zeros in
    the paper (section 3.2)."""
    least_masking: Fraction = 0.3
    """The mask ratio is cos(π/2 · u) with u uniform in [0, 1 - least_masking): 0.3 in the released
    code, which masks at least 45 %; not stated in the paper; 0 in MaskGIT."""
    loss_average: LossAverage = "batch"
    """`batch`: the sum over all masked tokens of a step, divided by their number, as in paper
    (appendix C.1) and released code. `images`: averaged over the masked tokens of each image, and
    then over images."""

    def num_places(self, config: RunConfig) -> int:
        """Return the number of tokens, plus 1 for the label."""
        return super().num_places(config) + 1

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that the width is even too, for the halves of token and mask."""
        yield from super().check(config)
        if config.model.hidden_size % 2:
            text = f"{config.model.hidden_size} must be even: token and mask take half of it each"
            yield "model.hidden_size", text


class EncoderDecoderConfig(LatentTokensConfig):
    """Config keys of GIVT-Causal with an encoder."""

    name: Literal["givt_encoder_decoder"] = "givt_encoder_decoder"
    num_classes: NonNegative = 0
    """Number of classes; 0, as in the paper, has a learned start token instead."""
    num_components: Positive = 1
    """k, components of the mixture; 1 in section 4.2."""
    encoder_layers: Positive = 24
    """Blocks of the encoder; 24 in the paper (ViT-L/16)."""
    encoder_patch_size: Positive = 16
    """Side of the encoder's patches in pixels."""
    encoder_hidden_size: Positive | None = None
    """Width of the encoder; defaults to that of `model`, as in the paper."""
    encoder_num_attention_heads: Positive | None = None
    """Attention heads of the encoder; defaults to those of `model`."""
    encoder_activation: Activation | None = None
    """Activation of the encoder's MLPs; defaults to that of `model`."""
    encoder_norm_epsilon: Above0 | None = None
    """Added to the variance inside the encoder's norms; defaults to that of `model`."""
    encoder_from_run: str | None = None
    """Run folder of a pretrained Vision Transformer, from whose newest weights the encoder starts:
    a run of `mae`, or one that `megavis import timm` or `vit` has made. The class token is dropped,
    and positions are resized to this run's images."""
    encoder_learning_rate_scale: Above0 = 1.0
    """Multiplies the learning rate of the encoder; 0.1 in the released code, where it starts from a
    pretrained Vision Transformer."""

    position_std: Above0 | None = None
    """Standard deviation of learned positions at initialization, in encoder and decoder; defaults
    to 1/√width, as in the released code. Larger ones help an encoder that starts from random
    weights: cross-attention finds the patches of a latent by their positions."""

    @property
    def num_further_blocks(self) -> int:
        """Blocks of the encoder."""
        return self.encoder_layers

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check the encoder's sizes too."""
        yield from super().check(config)
        yield from check_encoder(
            config,
            patch_size=self.encoder_patch_size,
            hidden_size=self.encoder_hidden_size,
            num_heads=self.encoder_num_attention_heads,
            key="objective.encoder_{}".format,
        )
