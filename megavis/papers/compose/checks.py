"""Which choices of a composition can be combined.

Each choice is checked against those before it, in the order tokens, schedule, asking, density,
condition, transform; what depends on kinds that do not fit is not checked. Every message ends in
choices that work, as "set KEY to VALUE, or KEY to VALUE", so following one never leads back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megavis.composition.shared_keys import (
    check_adapter,
    check_encoder,
    check_hiding,
    check_placed,
    check_tokens,
    nearest_divisors,
)
from megavis.config.schema import ConfigIssue, RunConfig
from megavis.papers.compose.sections import (
    AnyTokens,
    BridgeAsking,
    FrameTokens,
    GroupsSchedule,
    IdTokens,
    LatentTokens,
    MemoryCondition,
    OneByOneSchedule,
    PaletteTokens,
    PatchTokens,
    SelfAsking,
    ShiftAsking,
)
from megavis.schedules.boundaries import max_groups

if TYPE_CHECKING:
    from megavis.papers.compose.config import ComposeConfig

SCHEDULES = {
    "shift": ("one_by_one",),
    "mask": ("masked", "rounds"),
    "query": ("one_by_one", "groups"),
    "self": ("context",),
    "bridge": ("context",),
}
"""Schedules that fit each kind of asking."""
_WITHOUT_CONDITION = "set objective.condition.kind to none"
_WITHOUT_TRANSFORM = "set objective.transform.kind to none"


def check_composition(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a message for each choice that does not fit."""
    wrong_tokens = next(_check_token_kinds(keys, config), None)
    if wrong_tokens is not None:
        yield wrong_tokens
        return
    faults = [*_check_tokens(keys, config), *_check_kinds(keys)]
    yield from faults
    if faults:
        return
    rest = [*_check_schedule(keys, config), *_check_places(keys, config)]
    rest += [*_check_condition(keys, config), *_check_transform(keys)]
    yield from rest
    if not rest and not isinstance(keys.asks, BridgeAsking):  # `check_hiding` has checked these.
        height, width = keys.reads.grid(config.data)
        rows, read = keys.num_rows(height * width, config.classifies_only)
        queries = f", {read} of them queries," if read < rows else ""
        yield from check_tokens(config, rows, read, what=f"{rows} rows{queries}")


def _check_token_kinds(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that samples have the tokens that are read, and make those that are predicted."""
    reads, predicts = keys.reads, keys.predicts
    key, one_kind = "objective.reads.kind", "set objective.predicts to null"
    is_recorded = config.data.frames is not None
    if reads.kind == "frames" and not is_recorded:
        text = "frames does not fit images: give data.frames in place of data.image_size"
        yield key, f"{text}, or set it to patches"
    if reads.kind != "frames" and is_recorded:
        text = f"{reads.kind} does not fit recordings, which data.frames describes"
        yield key, f"{text}; set it to frames"
    if predicts is None:
        return
    if isinstance(reads, PaletteTokens):
        text = "palette shards contain no images to make other tokens of"
        yield key, f"{text}; {one_kind}"
    if isinstance(predicts, PaletteTokens):
        text = "palette ids can be predicted only from palette ids"
        yield "objective.predicts.kind", f"{text}; {one_kind}"
    if "frames" in (reads.kind, predicts.kind):
        text = "frames can be predicted only from frames"
        yield "objective.predicts.kind", f"{text}; {one_kind}"
    if isinstance(keys.asks, SelfAsking) and isinstance(reads, PatchTokens):
        text = "is not used with asks self, which predicts places"
        yield "objective.predicts.kind", f"{text}; {one_kind}"


def _check_tokens(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Check the sizes of the tokens, and that two kinds are made from the same images."""
    reads, predicts = keys.reads, keys.predicts
    yield from _check_size("reads", reads, config)
    if predicts is None:
        return
    for name, tokens in (("reads", reads), ("predicts", predicts)):
        if isinstance(tokens, IdTokens | LatentTokens) and tokens.tokenizer is None:
            text = "must name the run folder of the tokenizer that encodes images"
            yield f"objective.{name}.tokenizer", f"{text}; or set objective.predicts to null"
    sizes = [*_check_size("predicts", predicts, config)]
    yield from sizes
    first, other = reads.grid(config.data), predicts.grid(config.data)
    if not sizes and first != other and not [*_check_size("reads", reads, config)]:
        text = "has {} × {} tokens per image, but objective.reads has {} × {}"
        size = config.data.image_size // first[0]
        remedy = f"set objective.predicts.patch_size to {size}"
        yield "objective.predicts", f"{text.format(*other, *first)}; {remedy}"


def _check_size(name: str, tokens: AnyTokens, config: RunConfig) -> Iterator[ConfigIssue]:
    side, parallel = config.data.image_size, config.parallel
    tensor, key = parallel.tensor_model_parallel_size, f"objective.{name}"
    if isinstance(tokens, PatchTokens | IdTokens | LatentTokens) and side % tokens.patch_size:
        text = f"{tokens.patch_size} does not divide data.image_size {side}"
        sizes = nearest_divisors(tokens.patch_size, side)
        yield f"{key}.patch_size", f"{text}; set it to {sizes}"
    if isinstance(tokens, PaletteTokens | IdTokens) and tokens.vocabulary_size % tensor:
        size = tokens.vocabulary_size
        # A palette may have fewer colours than there are logits, a codebook may not.
        remedy = f"it to {size + -size % tensor}"
        if isinstance(tokens, IdTokens):
            remedy = "parallel.tensor_model_parallel_size to 1"
            if parallel.sequence_parallel:
                remedy += " and parallel.sequence_parallel to false"
        text = f"{size} is not divisible by tensor_model_parallel_size {tensor}"
        yield f"{key}.vocabulary_size", f"{text}; set {remedy}"


def _check_kinds(keys: ComposeConfig) -> Iterator[ConfigIssue]:
    """Check that schedule, asking and density fit each other and the tokens."""
    asks, schedule, kind = keys.asks.kind, keys.schedule.kind, keys.predicted.kind
    can_ask = fitting_asking(keys)
    possible = [name for name in can_ask if schedule in SCHEDULES[name]]
    if asks == "self" and schedule == "context" and asks not in can_ask:
        text = f"positions of {keys.reads.kind} cannot be predicted"
        other = (
            "objective.asks.kind to bridge"
            if "bridge" in can_ask
            else "objective.schedule.kind to one_by_one, masked, rounds or groups"
        )
        remedy = f"set objective.reads.kind to patches, or {other}"
        yield "objective.reads.kind", f"{text}; {remedy}"
    elif not possible:
        text = f"{schedule} cannot predict {kind}, only places, or values behind a bridge"
        remedy = "set objective.schedule.kind to one_by_one, masked, rounds or groups"
        yield "objective.schedule.kind", f"{text}; {remedy}"
    elif schedule not in SCHEDULES[asks]:
        text = f"{asks} needs schedule {' or '.join(SCHEDULES[asks])}, not {schedule}"
        remedy = f"set objective.asks.kind to {one_of(possible)}"
        if asks in can_ask:
            remedy += f", or objective.schedule.kind to {one_of(SCHEDULES[asks])}"
        yield "objective.asks.kind", f"{text}; {remedy}"
    else:
        yield from _check_density(keys)


def fitting_asking(keys: ComposeConfig) -> list[str]:
    """Return the kinds of asking that can predict the tokens under some schedule."""
    found = ["shift", "mask", "query"]
    if keys.predicts is None and isinstance(keys.reads, PatchTokens | FrameTokens):
        found.append("self")
    if not isinstance(keys.predicted, PaletteTokens | IdTokens):
        found.append("bridge")
    return found


def _check_density(keys: ComposeConfig) -> Iterator[ConfigIssue]:
    asks, density, kind = keys.asks.kind, keys.density.kind, keys.predicted.kind
    fitting: tuple[str, ...] = ("squared_error", "mixture", "diffusion")
    if asks == "self":
        fitting = ("place",)
    elif asks == "bridge":
        fitting = ("squared_error", "mixture")
    elif isinstance(keys.predicted, PaletteTokens | IdTokens):
        fitting = ("categorical",)
    if density in fitting:
        return
    text, remedy = f"{density} cannot predict {kind}", f"set it to {one_of(fitting)}"
    if "place" in (density, *fitting):
        text = f"{density} cannot be combined with asks {asks}"
    elif asks == "bridge" and density == "diffusion":
        text = "diffusion is not supported with a bridge"
    if density == "place" and "self" in fitting_asking(keys):
        remedy += ", or objective.asks.kind to self"
        remedy += "" if asks == "bridge" else " and objective.schedule.kind to context"
    yield "objective.density.kind", f"{text}; {remedy}"


def _check_schedule(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Check the keys of the schedule against the number of tokens."""
    schedule, (rows, columns) = keys.schedule, keys.reads.grid(config.data)
    count = rows * columns
    if isinstance(schedule, GroupsSchedule):
        most = max_groups(schedule.length, count)
        if schedule.num_groups > most:
            text = f"{schedule.num_groups} groups cannot be cut from {count} tokens"
            remedy = f"use at most {most}: set it to {most}"
            if not most:
                remedy = "set objective.schedule.kind to one_by_one"
            yield "objective.schedule.num_groups", f"{text}; {remedy}"
    if not isinstance(schedule, OneByOneSchedule):
        return
    if rows != columns and schedule.order not in ("raster", "random"):
        text = f"{schedule.order} needs a square grid, and frames are one row"
        yield "objective.schedule.order", f"{text}; set it to raster or random"
    elif schedule.order in ("nested_raster", "round_robin") and rows % schedule.order_block:
        text = f"{schedule.order_block} does not divide a grid of {rows} × {columns} tokens"
        sizes = nearest_divisors(schedule.order_block, rows)
        yield "objective.schedule.order_block", f"{text}; set it to {sizes}"
    if schedule.prefix:
        yield from _check_prefix(keys, schedule, count)


def _check_prefix(
    keys: ComposeConfig, schedule: OneByOneSchedule, count: int
) -> Iterator[ConfigIssue]:
    key, asks = "objective.schedule.prefix", keys.asks
    if schedule.order == "random":
        text = "a prefix needs an order that is the same for all images"
        yield key, f"{text}; set it to 0, or objective.schedule.order to raster"
    elif isinstance(asks, ShiftAsking) and asks.place != "content":
        text = "a prefix needs asks of kind shift with place content"
        yield key, f"{text}; set it to 0, or objective.asks.place to content"
    elif not isinstance(asks, ShiftAsking):
        text, remedy = "a prefix needs asks of kind shift with place content", "set it to 0"
        if keys.condition.kind != "features":  # They need queries.
            remedy += ", or objective.asks.kind to shift and objective.asks.place to content"
        yield key, f"{text}; {remedy}"
    elif schedule.prefix >= count:
        text = f"{schedule.prefix} leaves nothing to predict of {count} tokens"
        yield key, f"{text}; set it to {count - 1} or less"


def _check_places(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that rows know the positions that they need, and no others."""
    schedule, asks, positions = keys.schedule, keys.asks, config.model.positions or "learned"
    added = "learned" if config.model.hidden_size % 4 else "learned or sincos"
    if isinstance(asks, ShiftAsking) and isinstance(schedule, OneByOneSchedule):
        place, is_random = asks.place, schedule.order == "random"
        if place != "both" and is_random:
            text = f"{place} does not encode the position of the"
            text += f" {'held' if place == 'asked' else 'next'} token, which differs by image in"
            remedy = "set it to both, or objective.asks.kind to query"
            yield "objective.asks.place", f"{text} order random; {remedy}"
        if place == "both" and positions not in ("learned", "sincos", "learned_sincos"):
            remedy = f"set it to {added}"
            remedy += "" if is_random else ", or objective.asks.place to asked or content"
            yield "model.positions", f"{positions} cannot add two places to a row; {remedy}"
    if asks.kind in ("mask", "query") and positions == "none":
        text = f"none makes all tokens that {asks.kind} asks for indistinguishable"
        yield "model.positions", f"{text}; set it to {added}"
    ratio_key = "objective.schedule.mask_ratio"
    if isinstance(asks, SelfAsking):
        yield from check_placed(
            config,
            mask_ratio=keys.hidden_share,
            given_ratio=asks.given_ratio,
            ratio_key=ratio_key,
            given_key="objective.asks.given_ratio",
        )
    if isinstance(asks, BridgeAsking):
        count = math.prod(keys.reads.grid(config.data))
        if count == 1:
            text = "a bridge needs hidden tokens, and images have one token: use smaller ones"
            remedy = "set it to masked and objective.asks.kind to mask"
            yield "objective.schedule.kind", f"{text}, or {remedy}"
            return
        yield from check_hiding(
            config,
            count,
            keys.hidden_share,
            class_token=asks.class_token,
            ratio_key=ratio_key,
            class_key="objective.asks.class_token",
        )
        yield from asks.decoder.check(config, "objective.asks.decoder")


def _check_condition(keys: ComposeConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    """Check the tokens and asking of a conditional model."""
    condition, asks, reads = keys.condition, keys.asks.kind, keys.reads.kind
    key, on_images = "objective.condition.kind", ""
    if reads != "frames":
        on_images = ", or objective.reads.kind to patches"
    if condition.kind == "class" and asks not in ("shift", "query"):
        text = f"class takes the place of a first token, or precedes queries; asks is {asks}"
        yield key, f"{text}; {_WITHOUT_CONDITION}"
    if condition.kind == "features" and asks != "query":
        text, remedy = f"features need asks of kind query, not {asks}", _WITHOUT_CONDITION
        schedule = keys.schedule
        if isinstance(schedule, OneByOneSchedule) and not schedule.prefix:
            remedy += ", or objective.asks.kind to query"
        yield key, f"{text}; {remedy}"
    if condition.kind == "features" and reads != "patches":
        text = f"features are computed from images, which {reads} shards lack"
        yield "objective.reads.kind", f"{text}; {_WITHOUT_CONDITION}{on_images}"
    if isinstance(condition, MemoryCondition):
        yield from _check_memory(keys, condition, config, on_images)


def _check_memory(
    keys: ComposeConfig, memory: MemoryCondition, config: RunConfig, on_images: str
) -> Iterator[ConfigIssue]:
    """Check the tokens, asking and sizes of a model with an encoder."""
    key, reads = "objective.condition.kind", keys.reads.kind
    if keys.asks.kind == "bridge":
        text = "memory is not available to the blocks above a bridge, which predict"
        yield key, f"{text}; {_WITHOUT_CONDITION}"
    elif keys.asks.kind == "self":
        text = "memory would reveal the position of every token; asks is self"
        yield key, f"{text}; {_WITHOUT_CONDITION}"
    elif reads in ("palette", "frames"):
        text = f"an encoder reads images, which {reads} shards lack"
        yield "objective.reads.kind", f"{text}; {_WITHOUT_CONDITION}{on_images}"
    else:
        yield from check_encoder(
            config,
            patch_size=memory.patch_size,
            hidden_size=memory.hidden_size,
            num_heads=memory.num_attention_heads,
            key="objective.condition.{}".format,
        )


def _check_transform(keys: ComposeConfig) -> Iterator[ConfigIssue]:
    """Check that an adapter is used for next-token prediction of latents."""
    transform, schedule, asks = keys.transform, keys.schedule, keys.asks
    if transform.kind == "none":
        return
    if not isinstance(keys.reads, LatentTokens) or keys.predicts is not None:
        text = "adapter needs latents that are both read and predicted"
        yield "objective.transform.kind", f"{text}; {_WITHOUT_TRANSFORM}"
        return
    in_raster = isinstance(schedule, OneByOneSchedule) and schedule.order == "raster"
    shifts = isinstance(asks, ShiftAsking) and asks.place == "asked"
    if not (in_raster and shifts and keys.density.kind == "mixture"):
        text = "adapter needs schedule one_by_one in raster order, asks of kind shift with"
        text = f"{text} place asked, and density mixture"
        yield "objective.transform.kind", f"{text}; {_WITHOUT_TRANSFORM}"
        return
    yield from check_adapter(
        keys.reads.channels,
        transform.bottleneck,
        blocks_key="objective.transform.blocks",
        bottleneck_key="objective.transform.bottleneck",
        remedy=_WITHOUT_TRANSFORM,
    )


def one_of(words: Iterable[str]) -> str:
    """Join words by commas and "or"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
