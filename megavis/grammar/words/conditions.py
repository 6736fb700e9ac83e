"""What else a model knows: a condition in the sequence or a memory outside it; and a transform."""

from __future__ import annotations

from typing import Literal

from megavis.config.schema import Fraction, NonNegative, Positive
from megavis.config.section import Above0, Activation, Section


class ConditionWord(Section):
    """What the model is conditioned on: a start token, or rows in front of all others."""

    kind: str

    @property
    def num_front(self) -> int:
        """Rows in front of all others, if the asking kind has any."""
        return 1


class LearnedTokens(ConditionWord):
    """Learned tokens in front, such as a class token."""

    kind: Literal["learned_tokens"] = "learned_tokens"
    count: NonNegative = 1
    """Number of tokens."""

    @property
    def num_front(self) -> int:
        """All of them."""
        return self.count


class Labels(ConditionWord):
    """The class of the image: the start token, or a row in front of all others."""

    kind: Literal["labels"] = "labels"
    num_classes: Positive
    """Number of classes."""
    count: Positive = 1
    """Rows in front that hold the class, if the asking kind has any. If there are several, each has
    its own learned position in each stack."""
    dropout: Fraction = 0.1
    """Probability of the null label in training; 0 disables guidance and features."""
    modulation: Literal["none", "class", "class_and_row"] = "none"
    """How the class modulates the blocks. `class`: its vector is mapped to a shift and a scale of
    each norm's output and a gate of each branch, all zero at initialization ("Scalable Diffusion
    Models with Transformers", section 3.2, adaLN-Zero). `class_and_row`: the same, with a learned
    vector for each row of the sequence added to the class's."""

    @property
    def num_front(self) -> int:
        """As configured."""
        return self.count


class PooledFeatures(ConditionWord):
    """Features of a frozen tokenizer, averaged over the image, as a row in front."""

    kind: Literal["pooled_features"] = "pooled_features"
    tokenizer: str
    """Run folder of the tokenizer."""
    feature_size: Positive
    """Channels of the features."""


AnyCondition = LearnedTokens | PooledFeatures | Labels


class EncodedImage(Section):
    """Cross-attention to an encoder of an image; with pairs shards, of the first image."""

    kind: Literal["encoded_image"] = "encoded_image"
    num_layers: Positive = 8
    """Blocks of the encoder."""
    patch_size: Positive = 16
    """Side of the encoder's patches in pixels."""
    hidden_size: Positive | None = None
    """Width of the encoder; defaults to the model's."""
    num_attention_heads: Positive | None = None
    """Attention heads of the encoder; defaults to the model's."""
    activation: Activation | None = None
    """Activation of the encoder's MLPs; defaults to the model's."""
    norm_epsilon: Above0 | None = None
    """Added to the variance inside the encoder's norms; defaults to the model's."""
    position_std: Above0 | None = None
    """Standard deviation of the encoder's learned positions at initialization; default:
    1/√width."""
    learning_rate_scale: Above0 = 1.0
    """Multiplier of the encoder's learning rate."""
    from_run: str | None = None
    """Run folder of a pretrained Vision Transformer, from whose newest weights the encoder starts:
    a run of `mae`, or one made by `megavis import timm` or `vit`. The class token is dropped, and
    positions are resized to this run's images."""


class Adapter(Section):
    """An invertible map of latents, trained with the model."""

    kind: Literal["adapter"] = "adapter"
    blocks: Positive = 8
    """Coupling blocks."""
    bottleneck: Positive | None = None
    """Hidden channels; defaults to 4 · values of a token."""
