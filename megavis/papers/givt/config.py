"""Config keys of GIVT: those that all forms share, and those of each.

Where paper and released code differ, the docstring of the key says how; defaults are the code's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megavis.config.schema import ConfigIssue, Fraction, NonNegative, Positive, RunConfig
from megavis.config.section import Above0, Activation, AtLeast0, LossAverage, ScaleActivation
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    Adapter,
    AnyDensity,
    CorrelatedGaussian,
    EncodedImage,
    GaussianMixture,
    InitialWeights,
    Labels,
    Latents,
    LearnedTokens,
    Mask,
    OneByOne,
    Rounds,
    Shift,
)


class LatentTokensConfig(PaperConfig):
    """Config keys of all forms of GIVT."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "reads.patch_size": "downsampling",
        "reads.channels": "latent_channels",
        "reads.stacked": "stacked_latents",
        "reads.tokenizer": "tokenizer",
        "reads.tokenizer_beta": "tokenizer_beta",
        "condition.num_classes": "num_classes",
        "condition.dropout": "label_dropout",
        "transform": Renamed("adapter_blocks", "set it to 0"),
        "transform.blocks": Renamed("adapter_blocks", "set it to 0"),
        "transform.bottleneck": "adapter_bottleneck",
        **{
            f"memory.{name}": f"encoder_{name}"
            for name in ("patch_size", "hidden_size", "num_attention_heads", "from_run")
        },
        "memory.num_layers": "encoder_layers",
        "memory.activation": "encoder_activation",
        "memory.norm_epsilon": "encoder_norm_epsilon",
    }

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

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Check that a full covariance has one component."""
        if self.covariance == "full" and self.num_components != 1:
            text = f"{self.num_components} Gaussians cannot have a full covariance; use 1"
            yield "objective.num_components", text

    def grammar(self, run: RunConfig) -> Grammar:
        """Return raster order, latent by latent, after the class (sections 3.1 and 3.2).

        Initial weights are those of the released code, with Flax's default for the latents' map.
        """
        adapter, blocks = None, self.adapter_blocks
        if blocks:
            adapter = Adapter(blocks=blocks, bottleneck=self.adapter_bottleneck)
        return Grammar(
            reads=Latents(
                channels=self.latent_channels,
                patch_size=self.downsampling,
                stacked=self.stacked_latents,
                tokenizer=self.tokenizer,
                tokenizer_beta=self.tokenizer_beta,
            ),
            schedule=OneByOne(),
            asks=Shift(),
            density=self._density(),
            condition=self._labels(),
            transform=adapter,
            weights=InitialWeights(blocks="lecun", vectors="lecun", positions="width", tokens=1.0),
            positions=run.model.positions or "learned",
        )

    def _labels(self) -> Labels | None:
        """Return the classes; without them the first row is a learned start token."""
        if not self.num_classes:
            return None
        return Labels(num_classes=self.num_classes, dropout=self.label_dropout)

    def _density(self) -> AnyDensity:
        if self.covariance == "full":
            return CorrelatedGaussian(
                scale_activation=self.scale_activation,
                scale_floor=self.scale_floor,
                head_std=self.head_std,
            )
        return GaussianMixture(
            num_components=self.num_components,
            scale_activation=self.scale_activation,
            scale_floor=self.scale_floor,
            head_std=self.head_std,
        )


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

    def grammar(self, run: RunConfig) -> Grammar:
        """Return masking by drawn shares, and one row per token after the label's."""
        is_vector = self.masked_input == "vector"
        words = {
            "schedule": Rounds(
                least_masking=self.least_masking,
                loss_average=self.loss_average,
            ),
            "asks": Mask(filler="vector" if is_vector else "zero_token", marks=True),
            "condition": self._labels() or LearnedTokens(),
        }
        return super().grammar(run).model_copy(update=words)


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

    def grammar(self, run: RunConfig) -> Grammar:
        """Return GIVT-Causal with a cross-attention to an encoded image (section 4.2)."""
        memory = EncodedImage(
            num_layers=self.encoder_layers,
            patch_size=self.encoder_patch_size,
            hidden_size=self.encoder_hidden_size,
            num_attention_heads=self.encoder_num_attention_heads,
            activation=self.encoder_activation,
            norm_epsilon=self.encoder_norm_epsilon,
            position_std=self.position_std,
            learning_rate_scale=self.encoder_learning_rate_scale,
            from_run=self.encoder_from_run,
        )
        causal = super().grammar(run)
        positions = {"positions": self.position_std or "width"}
        weights = causal.weights.model_copy(update=positions)
        return causal.model_copy(update={"memory": memory, "weights": weights})
