"""Config keys of GIVT's encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megavis.composition.shared_keys import check_encoder
from megavis.config.choices import Activation
from megavis.config.schema import ConfigIssue, NonNegative, Positive, RunConfig
from megavis.config.section import Above0
from megavis.papers.givt.config import LatentTokensConfig


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
