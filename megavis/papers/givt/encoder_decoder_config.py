"""The keys of GIVT's encoder-decoder, besides those that it shares with the causal model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megavis.composition.shared_keys import check_encoder
from megavis.config.schema import ConfigIssue, NonNegative, Positive, RunConfig
from megavis.config.section import Above0
from megavis.papers.givt.config import LatentTokensConfig


class EncoderDecoderConfig(LatentTokensConfig):
    """GIVT-Causal with an encoder."""

    name: Literal["givt_encoder_decoder"] = "givt_encoder_decoder"
    num_classes: NonNegative = 0
    """Classes whose label comes first; 0, as in the paper: a learned start vector."""
    num_components: Positive = 1
    """k of the mixture; 1 in section 4.2."""
    encoder_layers: Positive = 24
    """Blocks of the encoder; 24 in the paper's, ViT-L/16."""
    encoder_patch_size: Positive = 16
    """Pixels on the side of its patches."""
    encoder_hidden_size: Positive | None = None
    """Its width; that of `model` when absent, as in the paper."""
    encoder_num_attention_heads: Positive | None = None
    """Its attention heads; those of `model` when absent."""
    encoder_learning_rate_scale: Above0 = 1.0
    """Multiplies the learning rate of the encoder; 0.1 in the released code, where it starts from a
    trained Vision Transformer."""

    @property
    def num_further_blocks(self) -> int:
        """Blocks of the encoder."""
        return self.encoder_layers

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches divide the image."""
        yield from super().check(config)
        yield from check_encoder(
            config,
            patch_size=self.encoder_patch_size,
            hidden_size=self.encoder_hidden_size,
            num_heads=self.encoder_num_attention_heads,
            key="objective.encoder_{}".format,
        )
