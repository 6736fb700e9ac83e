"""GIVT: Generative Infinite-Vocabulary Transformers (Tschannen et al., 2024), in three forms.

GIVT-Causal: an image is the raster sequence of a VAE's real-valued latents. Each token is predicted
from those before it as a mixture of Gaussians instead of logits over a vocabulary (section 3.2); a
class embedding comes first.

GIVT-MaskGIT: masked latents are predicted from the others (section 3.2), after "MaskGIT" (Chang et
al., 2022): the mask ratio cos(π/2 · u) is drawn for each image.

The encoder-decoder, the paper's model for dense prediction, after UViM: latents are predicted from
an image (section 4.2, appendix B). It is GIVT-Causal with a cross-attention after each
self-attention, to a Vision Transformer's encoding of the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megavis.config.schema import Fraction, NonNegative, Positive, RunConfig
from megavis.config.section import Above0, Activation, LossAverage
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import Renamed
from megavis.grammar.words import (
    EncodedImage,
    LearnedTokens,
    Mask,
    Rounds,
)
from megavis.papers.givt.latents import LatentTokensConfig


class GIVTConfig(LatentTokensConfig):
    """GIVT-Causal."""

    name: Literal["givt"] = "givt"


class MaskGITConfig(LatentTokensConfig):
    """Config keys of GIVT-MaskGIT."""

    name: Literal["givt_maskgit"] = "givt_maskgit"
    masked_input: Literal["vector", "zeros"] = "vector"
    """Embedding of a masked token: a learned vector in the released code, the embedding of zeros in
    the paper (section 3.2)."""
    least_masking: Fraction = 0.3
    """The mask ratio is cos(π/2 · u) with u uniform in [0, 1 - least_masking): 0.3 in the released
    code, which masks at least 45 %; not stated in the paper; 0 in MaskGIT."""
    loss_average: LossAverage = "batch"
    """`batch`: averaged over all masked tokens of a step, as in the paper (appendix C.1) and the
    released code. `images`: averaged over the masked tokens of each image, then over images."""

    def grammar(self, run: RunConfig) -> Grammar:
        """Return masking by drawn shares, and one row per token after the label's."""
        is_vector = self.masked_input == "vector"
        words = {
            "schedule": Rounds(
                least_masking=self.least_masking,
                loss_average=self.loss_average,
            ),
            "asks": Mask(filler="vector" if is_vector else "zero_token", marks=True),
            "condition": self.labels() or LearnedTokens(),
        }
        return super().grammar(run).model_copy(update=words)


class EncoderDecoderConfig(LatentTokensConfig):
    """Config keys of GIVT-Causal with an encoder."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        **LatentTokensConfig.names,
        **{
            f"memory.{name}": f"encoder_{name}"
            for name in EncodedImage.model_fields
            if name not in ("kind", "num_layers", "position_std")
        },
        "memory.num_layers": "encoder_layers",
        "memory.position_std": "position_std",
    }

    name: Literal["givt_encoder_decoder"] = "givt_encoder_decoder"
    num_classes: NonNegative = 0
    """Number of classes; 0, as in the paper, uses a learned start token instead."""
    num_components: Positive = 1
    """k, components of the mixture; 1 in section 4.2."""
    encoder_layers: Positive = 24
    """Blocks of the encoder; 24 in the paper (ViT-L/16)."""
    encoder_patch_size: Positive = 16
    """Side of the encoder's patches in pixels."""
    encoder_hidden_size: Positive | None = None
    """Width of the encoder; defaults to the model's, as in the paper."""
    encoder_num_attention_heads: Positive | None = None
    """Attention heads of the encoder; defaults to the model's."""
    encoder_activation: Activation | None = None
    """Activation of the encoder's MLPs; defaults to the model's."""
    encoder_norm_epsilon: Above0 | None = None
    """Added to the variance inside the encoder's norms; defaults to the model's."""
    encoder_from_run: str | None = None
    """Run folder of a pretrained Vision Transformer, from whose newest weights the encoder starts:
    a run of `mae`, or one made by `megavis import timm` or `vit`. The class token is dropped, and
    positions are resized to this run's images."""
    encoder_learning_rate_scale: Above0 = 1.0
    """Multiplier of the encoder's learning rate; 0.1 in the released code, where the encoder starts
    from a pretrained Vision Transformer."""

    position_std: Above0 | None = None
    """Standard deviation of learned positions at initialization, in encoder and decoder; defaults
    to 1/√width, as in the released code. Larger values help an encoder that starts from random
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
