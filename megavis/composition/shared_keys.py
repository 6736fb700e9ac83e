"""Keys and checks that papers share, such as sizes that image or tensor group must divide by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megavis.config.schema import ConfigIssue, Positive, RunConfig
from megavis.config.section import Section
from megavis.schedules.boundaries import context_size

_ADDED = ("learned", "sincos")


class DecoderConfig(Section):
    """Blocks above the encoder's, behind a bridge; their other keys are those of `model`."""

    num_layers: Positive = 8
    """Blocks."""
    hidden_size: Positive = 512
    """Their width; 4 must divide it."""
    num_attention_heads: Positive = 16
    """Their attention heads."""

    def check(self, config: RunConfig, key: str) -> Iterator[ConfigIssue]:
        """Check that heads divide the width, and divide by the tensor group."""
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads or width % 4:
            text = f"{width} is not divisible by 4 and by num_attention_heads {heads}"
            yield f"{key}.hidden_size", text
        tensor = config.parallel.tensor_model_parallel_size
        if heads % tensor:
            text = f"{heads} heads are not divisible by tensor_model_parallel_size {tensor}"
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
    """Check tokens of which an encoder sees some, and a decoder behind a bridge predicts others.

    Args:
        config: the run's.
        count: tokens of an image.
        ratio: share of them that the encoder does not see.
        class_token: a token comes first in both.
        ratio_key: what says `ratio`.
        class_key: what says `class_token`.
    """
    seen = context_size(count, ratio)
    if count and seen == count:
        yield ratio_key, f"{ratio} of {count} patches hides none; raise it, or use smaller patches"
    if config.model.positions not in (None, *_ADDED):
        text = f"{config.model.positions} does not reach the decoder; use sincos or learned"
        yield "model.positions", text
    counts = [seen + class_token, count + class_token]
    what = "{} tokens of the encoder and {} of the decoder".format(*counts)
    remedy = f"change {ratio_key} or {class_key}"
    yield from check_tokens(config, *counts, what=what, remedy=remedy)
    if config.finetune is not None and config.finetune.generative_weight:
        text = "needs patches hidden for the paper's own loss, and all seen for classes"
        yield "finetune.generative_weight", f"{text}; set it to 0"


def check_placed(
    config: RunConfig, *, mask_ratio: float, given_ratio: float, ratio_key: str, given_key: str
) -> Iterator[ConfigIssue]:
    """Check that tokens with a given place have positions, and those that predict it none.

    In plain fine-tuning all may have position embeddings.

    Args:
        config: the run's.
        mask_ratio: share of the hidden tokens.
        given_ratio: share of them, all seen, whose place is given.
        ratio_key: what says `mask_ratio`.
        given_key: what says `given_ratio`.
    """
    tuned = config.finetune
    tells_all = tuned is not None and not tuned.generative_weight
    kind = config.model.positions or "none"
    if given_ratio and kind not in _ADDED and not tells_all:
        text = f"{given_ratio} of the patches are given their position; model.positions"
        yield given_key, f"{text} must say how: learned or sincos"
    if given_ratio >= 1.0 - mask_ratio and given_ratio:
        text = f"{given_ratio} leaves no context that does not know its place"
        yield given_key, f"{text}; lower it, or {ratio_key}"
    if kind == "none":
        return
    relative = ("relative_2d",) if config.objective.has_relative_positions else ()
    if not given_ratio and not tells_all:
        yield "model.positions", f"{kind} gives away what the model has to predict; leave it out"
    elif kind not in (*_ADDED, *relative):
        known = ", ".join((*_ADDED, *relative))
        yield "model.positions", f"{kind} is not for sets of patches; use {known} or none"


def check_patches(
    config: RunConfig, patch_size: int, key: str = "patch_size"
) -> Iterator[ConfigIssue]:
    """Check that patches tile the image.

    Args:
        config: the run's.
        patch_size: side of a patch in pixels.
        key: of the objective, that says so.
    """
    side = config.data.image_size
    if side % patch_size:
        yield f"objective.{key}", f"{patch_size} does not divide data.image_size {side}"


def check_encoder(
    config: RunConfig,
    *,
    patch_size: int,
    hidden_size: int | None,
    num_heads: int | None,
    key: Callable[[str], str],
) -> Iterator[ConfigIssue]:
    """Check that an encoder's patches tile the image, and that its sizes divide by the layout.

    Args:
        config: the run's.
        patch_size: side of its patches in pixels.
        hidden_size: its width; that of `model` when None.
        num_heads: likewise.
        key: from one of these names to the key that says it.
    """
    side, tensor = config.data.image_size, config.parallel.tensor_model_parallel_size
    if side % patch_size:
        yield key("patch_size"), f"{patch_size} does not divide data.image_size {side}"
    width = hidden_size or config.model.hidden_size
    heads = num_heads or config.model.num_attention_heads
    if width % heads:
        yield key("num_attention_heads"), f"width {width} does not divide by {heads} heads"
    if heads % tensor:
        text = f"{heads} heads do not divide by tensor_model_parallel_size {tensor}"
        yield key("num_attention_heads"), text
    count = (side // patch_size) ** 2
    what, remedy = f"{count} patches of the encoder", f"change {key('patch_size')}"
    yield from check_tokens(config, count, what=what, remedy=remedy)


def check_vocabulary(config: RunConfig, vocabulary_size: int) -> Iterator[ConfigIssue]:
    """Check that the tensor group can share the logits."""
    tensor = config.parallel.tensor_model_parallel_size
    if vocabulary_size % tensor:
        text = f"{vocabulary_size} is not divisible by tensor_model_parallel_size {tensor}"
        yield "objective.vocabulary_size", text


def check_tokens(
    config: RunConfig, *counts: int, what: str, remedy: str = "set it to false"
) -> Iterator[ConfigIssue]:
    """Check that sequence parallelism, where it is on, can share the tokens.

    Args:
        config: the run's.
        counts: numbers of tokens, each of which is split.
        what: the tokens in words, with their number.
        remedy: what would be right.
    """
    tensor = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and any(count % tensor for count in counts):
        text = f"{what} are not divisible by tensor_model_parallel_size {tensor}; {remedy}"
        yield "parallel.sequence_parallel", text


def check_adapter(
    token_size: int, bottleneck: int | None, *, blocks_key: str, bottleneck_key: str
) -> Iterator[ConfigIssue]:
    """Check that an adapter can couple the halves of a token, and that its groups divide them.

    Args:
        token_size: numbers of a token.
        bottleneck: hidden channels; 4 · `token_size` when None.
        blocks_key: what says how many blocks there are.
        bottleneck_key: what says `bottleneck`.
    """
    half, groups = token_size // 2, min(32, token_size // 2)
    hidden = (bottleneck or 4 * token_size) // 2
    if token_size % 2:
        text = f"an adapter couples halves of a token, and {token_size} numbers are odd"
        yield blocks_key, f"{text}; do without"
    elif half % groups or hidden % groups:
        text = f"half of it and of the {token_size} numbers of a token must divide by"
        yield bottleneck_key, f"{text} {groups}"
