"""Config keys and checks that papers share, such as sizes that must divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from megavis.config.schema import ConfigIssue, Fraction, ObjectiveConfig, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0, Section
from megavis.schedules.boundaries import context_size

_ADDED = ("learned", "sincos", "learned_sincos")


def nearest_divisors(value: int, whole: int, unit: int = 1) -> str:
    """Return the next smaller and larger divisors of `whole` as words, such as "4 or 8".

    Args:
        value: no divisor itself.
        whole: 1 or more.
        unit: only its multiples count; at least one divides `whole`.
    """
    sizes = [size for size in range(unit, whole + 1, unit) if whole % size == 0]
    below, above = ([s for s in sizes if s < value], [s for s in sizes if s > value])
    return " or ".join(str(size) for size in (*below[-1:], *above[:1]))


class DecoderConfig(Section):
    """Decoder blocks on top of an encoder; all other sizes are those of `model`."""

    num_layers: Positive = 8
    """Number of decoder blocks."""
    hidden_size: Positive = 512
    """Width of the decoder, a multiple of 4."""
    num_attention_heads: Positive = 16
    """Attention heads of the decoder."""

    def check(self, config: RunConfig, key: str) -> Iterator[ConfigIssue]:
        """Check that heads divide the width, and that the layout divides them."""
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads or width % 4:
            unit = math.lcm(4, heads)
            text = f"{width} is not divisible by 4 and by num_attention_heads {heads}"
            yield f"{key}.hidden_size", f"{text}; set it to {-(-width // unit) * unit}"
        if heads % config.parallel.head_parts:
            text = f"{heads} heads are not divisible by {config.parallel.head_parts_text}"
            text += f"; set it to a multiple of {config.parallel.head_parts}"
            yield f"{key}.num_attention_heads", text


def check_hiding(
    config: RunConfig,
    count: int,
    ratio: float,
    *,
    class_token: bool,
    ratio_key: str,
    class_key: str,
) -> Iterator[ConfigIssue]:
    """Check the token counts of an encoder that sees some tokens, and of its decoder.

    Args:
        count: tokens of an image.
        ratio: share of the tokens hidden from the encoder.
        class_token: whether a class token comes first in both.
    """
    seen = context_size(count, ratio)
    if count and seen == count:
        text = f"{ratio} of {count} patches hides none; use smaller patches"
        least = f", or set it to {math.ceil(1000 / count) / 1000:g} or more"
        yield ratio_key, text + (least if count > 1 else "")
    if config.model.positions not in (None, *_ADDED):
        text = f"{config.model.positions} does not reach the decoder"
        yield "model.positions", f"{text}; set it to learned or sincos"
    counts = [seen + class_token, count + class_token]
    what = "{} tokens of the encoder and {} of the decoder".format(*counts)
    remedy = f"change {ratio_key} or {class_key}"
    if config.classifies_only:  # The encoder sees all, and there is no decoder.
        counts, what, remedy = counts[1:], f"{counts[1]} tokens", f"change {class_key}"
    yield from check_tokens(config, *counts, what=what, remedy=remedy)
    if config.finetune is not None and config.finetune.generative_weight:
        text = "needs patches hidden for the paper's own loss, and all seen for classes"
        yield "finetune.generative_weight", f"{text}; set it to 0"


def check_placed(
    config: RunConfig, *, mask_ratio: float, given_ratio: float, ratio_key: str, given_key: str
) -> Iterator[ConfigIssue]:
    """Check that only tokens with a given position have a position encoding.

    In fine-tuning without the paper's own loss, all tokens may have one. `mask_ratio` is the share
    of the tokens outside the context, `given_ratio` that of tokens within it whose position is
    given.
    """
    shows_all_positions = config.classifies_only
    kind = config.model.positions or "none"
    if given_ratio and kind not in _ADDED and not shows_all_positions:
        text = f"{given_ratio} of the patches are given their position, and {kind} cannot say it"
        yield given_key, f"{text}; set model.positions to learned or sincos"
    if given_ratio >= 1.0 - mask_ratio and given_ratio:
        text = f"{given_ratio} leaves no context token without its position"
        yield given_key, f"{text}; lower it below {1.0 - mask_ratio:g}, or set it to 0"
    if kind == "none":
        return
    relative = ("relative_2d",) if config.objective.has_relative_positions else ()
    if not given_ratio and not shows_all_positions:
        text = f"{kind} reveals what the model has to predict; leave it out"
        yield "model.positions", f"{text}: set it to none"
    elif kind not in (*_ADDED, *relative) and not given_ratio:
        known = ", ".join((*_ADDED, *relative))
        text = f"{kind} is not for sets of patches"
        yield "model.positions", f"{text}; set it to {known} or none"


def check_patches(
    config: RunConfig, patch_size: int, *, key: str = "objective.patch_size"
) -> Iterator[ConfigIssue]:
    """Check that patches with sides of `patch_size` pixels (`key`) tile the image."""
    side = config.data.image_size
    if side % patch_size:
        text = f"{patch_size} does not divide data.image_size {side}"
        yield key, f"{text}; set it to {nearest_divisors(patch_size, side)}"


def check_encoder(
    config: RunConfig,
    *,
    patch_size: int,
    hidden_size: int | None,
    num_heads: int | None,
    key: Callable[[str], str],
) -> Iterator[ConfigIssue]:
    """Check that an encoder's patches tile the image, and that the layout divides its sizes.

    Args:
        hidden_size: its width; that of `model` by default.
        num_heads: its attention heads; those of `model` by default.
        key: maps the name of a size to its config key.
    """
    yield from check_patches(config, patch_size, key=key("patch_size"))
    width = hidden_size or config.model.hidden_size
    heads = num_heads or config.model.num_attention_heads
    parts = config.parallel.head_parts
    if width % parts:
        text = f"{width} is not divisible by {config.parallel.head_parts_text}"
        yield key("hidden_size"), f"{text}; set it to {-(-width // parts) * parts}"
    elif width % heads:
        text = f"width {width} does not divide by {heads} heads"
        choices = nearest_divisors(heads, width, parts)
        yield key("num_attention_heads"), f"{text}; set it to {choices}"
    elif heads % parts:
        text = f"{heads} heads do not divide by {config.parallel.head_parts_text}"
        choices = nearest_divisors(heads, width, parts)
        yield key("num_attention_heads"), f"{text}; set it to {choices}"
    count = (config.data.image_size // patch_size) ** 2
    what, remedy = f"{count} patches of the encoder", f"change {key('patch_size')}"
    yield from check_tokens(config, count, what=what, remedy=remedy)


def check_vocabulary(config: RunConfig, vocabulary_size: int) -> Iterator[ConfigIssue]:
    """Check that the tensor size divides the vocabulary."""
    tensor = config.parallel.tensor_model_parallel_size
    if vocabulary_size % tensor:
        text = f"{vocabulary_size} is not divisible by tensor_model_parallel_size {tensor}"
        yield "objective.vocabulary_size", text


def check_tokens(
    config: RunConfig, *counts: int, what: str, remedy: str = ""
) -> Iterator[ConfigIssue]:
    """Check that the layout divides the tokens, under sequence and context parallelism.

    Args:
        counts: token counts, each of which is split.
        what: description of the tokens, with their number, for the message.
        remedy: what to do about it besides doing without the key, for the message.
    """
    parallel, context = config.parallel, config.parallel.context_parallel_size
    remedy += ", or " if remedy else ""
    if any(count % context for count in counts):
        text = f"{what} are not divisible by context_parallel_size {context}"
        yield "parallel.context_parallel_size", f"{text}; {remedy}set it to 1"
    elif any(count % parallel.token_parts for count in counts):
        text = f"{what} are not divisible by {parallel.head_parts_text}"
        yield "parallel.sequence_parallel", f"{text}; {remedy}set it to false"


def check_adapter(
    token_size: int,
    bottleneck: int | None,
    *,
    blocks_key: str,
    bottleneck_key: str,
    remedy: str = "set it to 0",
) -> Iterator[ConfigIssue]:
    """Check that a token has two halves to couple, and that the norm's groups divide the channels.

    Args:
        token_size: channels of a token.
        bottleneck: hidden channels; 4 · `token_size` by default.
        remedy: how to do without an adapter, for the message.
    """
    half, groups = token_size // 2, min(32, token_size // 2)
    hidden = (bottleneck or 4 * token_size) // 2
    if token_size % 2:
        text = f"an adapter couples halves of a token, but {token_size} channels are odd"
        yield blocks_key, f"{text}; {remedy}"
    elif half % groups:
        text = f"an adapter couples halves of a token, but half of {token_size} channels"
        yield blocks_key, f"{text} is not divisible by {groups}; {remedy}"
    elif hidden % groups or not hidden:
        text = f"half of it must be divisible by {groups}, as half of a token's channels is"
        yield bottleneck_key, f"{text}; set it to {2 * groups * max(1, round(hidden / groups))}"


class AutoencoderConfig(ObjectiveConfig):
    """Keys of the `objective` section of an autoencoder."""

    has_blocks: ClassVar[bool] = False

    filters: Positive = 128
    """Channels of the first level, a multiple of `norm_groups`."""
    multipliers: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = (
        1,
        1,
        2,
        2,
        4,
    )
    """Channels of each level as multiples of `filters`; resolution halves between levels."""
    blocks_per_level: Positive = 2
    """Residual blocks per level. A VAE has as many in the middle; a VQGAN's decoder has one more
    per level."""
    norm_groups: Positive = 32
    """Groups of each group norm; 32 in the papers. Narrow networks need fewer groups, since a group
    of one channel loses its mean."""
    reconstruction_weight: AtLeast0 = 1.0
    """Weight of the squared error, averaged over pixels and channels in [0, 1]."""
    perceptual_weight: AtLeast0 = 0.1
    """Weight of the perceptual distance in VGG-16 features; 0 disables it."""
    perceptual_weights: str | None = None
    """File of VGG-16 weights (.safetensors or .pth, torchvision's names)."""
    adversarial_weight: AtLeast0 = 0.1
    """Weight of the non-saturating adversarial loss; 0 trains without a discriminator."""
    r1_weight: AtLeast0 = 10.0
    """γ of the R1 penalty γ/2 · ‖∇D(x)‖² at images."""
    discriminator_filters: Positive = 64
    """Channels of the discriminator's first level."""
    discriminator_learning_rate: Above0 | None = None
    """Peak learning rate of the discriminator; defaults to optimizer.learning_rate."""
    discriminator_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
    """Adam's betas of the discriminator; defaults to optimizer.betas."""

    @property
    def downsampling(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** (len(self.multipliers) - 1)

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that sizes divide, VGG-16 weights are given if needed, and the layout is valid."""
        if self.filters % self.norm_groups:
            text = f"{self.filters} is not a multiple of objective.norm_groups {self.norm_groups}"
            yield "objective.filters", text
        if config.data.image_size % self.downsampling:
            text = f"{config.data.image_size} is not divisible by {self.downsampling}, the"
            yield "data.image_size", f"{text} side of a latent in pixels"
        if self.perceptual_weight and self.perceptual_weights is None:
            text = "must name a file of VGG-16 weights; or set perceptual_weight: 0"
            yield "objective.perceptual_weights", text
        yield from self._check_layout(config)

    def _check_layout(self, config: RunConfig) -> Iterator[ConfigIssue]:
        parallel = config.parallel
        for axis in ("tensor_model", "context", "pipeline_model"):
            key = f"{axis}_parallel_size"
            if getattr(parallel, key) > 1:
                text = f"a {self.name} supports only data parallelism; set it to 1"
                yield f"parallel.{key}", text
        if parallel.zero_stage == 3:
            text = "3 partitions weights that the R1 penalty differentiates twice; use 2"
            yield "parallel.zero_stage", text
        if parallel.activation_checkpointing != "none":
            yield "parallel.activation_checkpointing", "is for Transformer blocks; use none"
