"""Which keys of schedule and asking fit the tokens and the run."""

from __future__ import annotations

import math
from functools import singledispatch

from megavis.config.schema import RunConfig
from megavis.config.section import ROTARY
from megavis.grammar.boundaries import Segmentation, boundaries_error, context_size, max_groups
from megavis.grammar.faults import Fault, Faults, nearest_divisors
from megavis.grammar.grammar import Grammar
from megavis.grammar.words import (
    AskWord,
    Context,
    Groups,
    InContext,
    Instruct,
    Mask,
    Masked,
    OneByOne,
    Query,
    Rounds,
    ScheduleWord,
    Shift,
    Visible,
)

ADDED = ("learned", "sincos", "learned_sincos")
"""Positions that are added to the rows."""


@singledispatch
def check_schedule(schedule: ScheduleWord, grammar: Grammar, run: RunConfig) -> Faults:
    """Check the keys of the schedule against the number of tokens."""
    yield from ()


@check_schedule.register
def _(schedule: Groups, grammar: Grammar, run: RunConfig) -> Faults:
    boundaries, count, key = schedule.boundaries, grammar.num_tokens(run), "schedule.boundaries"
    # Random length needs fewer groups than fixed length, which is what other lengths would be.
    cut: Segmentation = "random" if schedule.length == "given" else schedule.length
    most = max_groups(cut, count)
    fewer = schedule.num_groups > most
    groups = f" and {{schedule.num_groups}} to {max(1, most)}" if fewer else ""
    fault = boundaries_error(boundaries, count) if boundaries is not None else None
    if boundaries is None and schedule.length == "given":
        text = "must list where groups end if {schedule.length} is given"
        yield Fault(key, text, f"list them, or set {{schedule.length}} to random{groups}")
    elif boundaries is not None and schedule.length != "given":
        text = f"is for {{schedule.length}} given, not {schedule.length}"
        other = "" if fault else ", or {schedule.length} to given"
        yield Fault(key, text, f"set it to null{groups}{other}")
    elif fault:
        remedy = "correct them, or set it to null and {schedule.length} to random"
        yield Fault(key, fault, f"{remedy}{groups}")
    elif fewer and boundaries is None:
        text = f"{schedule.num_groups} groups cannot be cut from {count} tokens with"
        text = f"{text} {schedule.length} length"
        remedy = f"use at most {most}: set it to {most}"
        if not most:
            one = "it to 1 and " if schedule.num_groups > 1 else ""
            remedy = f"use smaller tokens, or set {one}{{schedule.length}} to fixed"
        yield Fault("schedule.num_groups", text, remedy)


@check_schedule.register
def _(schedule: Masked, grammar: Grammar, run: RunConfig) -> Faults:
    if schedule.shape != "tokens" and schedule.count == "drawn":
        text = f"{schedule.shape} needs the same number of hidden tokens in every image"
        yield Fault("schedule.shape", text, "set {schedule.count} to exact, or it to tokens")
    yield from _check_grid(schedule, grammar, run)


@check_schedule.register
def _(schedule: Context, grammar: Grammar, run: RunConfig) -> Faults:
    yield from _check_grid(schedule, grammar, run)


def _check_grid(schedule: Masked | Context, grammar: Grammar, run: RunConfig) -> Faults:
    """Check that squares of 2 × 2 tokens divide the image, unless nothing is hidden."""
    if schedule.shape != "grid" or run.classifies_only:
        return
    height, width = grammar.reads.grid(run.data)
    if height % 2 or width % 2:
        text = f"grid needs even sides, and an image has {height} × {width} tokens"
        yield Fault("schedule.shape", text, "set it to tokens or blocks, or change the size")
    if schedule.mask_ratio != 0.75:
        text = f"{schedule.mask_ratio} is not what {{schedule.shape}} grid hides"
        yield Fault("schedule.mask_ratio", text, "set it to 0.75")


@check_schedule.register
def _(schedule: OneByOne, grammar: Grammar, run: RunConfig) -> Faults:
    (rows, columns), order = grammar.reads.grid(run.data), schedule.order
    if not isinstance(order, str):
        if len(order) != rows * columns:
            text = f"lists {len(order)} tokens, and images have {rows * columns}"
            yield Fault("schedule.order", text, "list each of them once, or set it to raster")
    elif rows != columns and order not in ("raster", "random"):
        text = f"{order} needs a square grid, and tokens are {rows} × {columns}"
        is_shifted = isinstance(grammar.asks, Shift) and grammar.asks.place != "both"
        yield Fault("schedule.order", text, f"set it to raster{'' if is_shifted else ' or random'}")
    elif order in ("nested_raster", "round_robin") and rows % schedule.order_block:
        text = f"{schedule.order_block} does not divide a grid of {rows} × {columns} tokens"
        sizes = nearest_divisors(schedule.order_block, rows)
        yield Fault("schedule.order_block", text, f"set it to {sizes}")
    if schedule.anneal is not None:
        yield from _check_annealing(schedule, schedule.anneal)
    if schedule.num_given:
        yield from _check_prefix(schedule, grammar, rows * columns)


def _check_annealing(schedule: OneByOne, shares: tuple[float, float]) -> Faults:
    """Check that annealing ends in a shared order, and does not end before it begins."""
    key, (start, end) = "schedule.anneal", shares
    if schedule.order == "random" and schedule.drawn == "image":
        text = "must end in an order that all images share, and {schedule.order} is random"
        yield Fault(key, text, "set it to null, or {schedule.order} to raster")
    elif start > end:
        text = f"[{start:g}, {end:g}] ends before it begins"
        yield Fault(key, text, f"set it to [{end:g},{start:g}]")


def _check_prefix(schedule: OneByOne, grammar: Grammar, count: int) -> Faults:
    """Check that an order gives the prefix, rows hold its places, and it leaves tokens."""
    asks, texts, changes = grammar.asks, [], []
    if schedule.differs_by_image:
        texts += ["a prefix needs an order that is the same for all images"]
        changes += ["order} to raster" if schedule.anneal is None else "anneal} to null"]
        changes = [f"{{schedule.{each}" for each in changes]
    if asks.kind != "shift" or asks.place != "content":
        texts += ["a prefix needs asks of kind shift with place content"]
        changes += [] if asks.kind == "shift" else ["{asks.kind} to shift"]
        changes += ["{asks.place} to content"]
    if schedule.num_given >= count:
        texts += [f"{schedule.prefix} of {count} tokens leaves none to predict"]
        if schedule.prefix == "drawn":
            texts[-1] = "a drawn prefix needs at least two tokens, and images have one"
        changes += [f"{{schedule.prefix}} to {count - 1}"]
    if not texts:
        return
    remedy = f"set it to {count - 1} or less"
    if len(texts) > 1 or schedule.num_given < count:
        remedy = f"set it to 0{_with_start(asks)}"
        if grammar.condition is None or grammar.condition.kind == "labels":
            remedy += f", or {' and '.join(changes)}"
    yield Fault("schedule.prefix", texts[0], remedy)


def _with_start(asks: AskWord) -> str:
    """Return the change that predicts the first token, if it was given before."""
    return " and {asks.start} to true" if isinstance(asks, Shift) and not asks.start else ""


@singledispatch
def check_asking(asks: AskWord, grammar: Grammar, run: RunConfig) -> Faults:
    """Check the keys of the asking kind, and the positions that its rows need."""
    yield from ()


def added_positions(run: RunConfig) -> str:
    """Return the kinds of positions that are added to rows of this width, as words."""
    return "learned" if run.model.hidden_size % 4 else "learned or sincos"


@check_asking.register
def _(asks: Shift, grammar: Grammar, run: RunConfig) -> Faults:
    place, is_random = asks.place, grammar.schedule.differs_by_image
    if place != "both" and is_random:
        text = f"{place} does not encode the position of the"
        text += f" {'held' if place == 'asked' else 'next'} token, which differs by image in"
        remedy = "set it to both"
        remedy += "" if grammar.positions in ADDED else " and model.positions to learned"
        remedy += ", or {asks.kind} to query"
        yield Fault("asks.place", f"{text} order random", remedy)
    if place == "both" and grammar.positions not in ADDED:
        remedy = f"set it to {added_positions(run)}"
        remedy += "" if is_random else ", or {asks.place} to asked or content"
        yield Fault(
            "model.positions", f"{grammar.positions} cannot add two places to a row", remedy
        )
    yield from _check_zero_start(asks, grammar)
    if asks.sink and not asks.start:
        text = "true puts a row before the start token, which {asks.start} leaves out"
        yield Fault("asks.sink", text, "set it to false")
    if not asks.start and not grammar.schedule.num_given:
        text = "false leaves no row to predict the first token, which must then be given"
        yield Fault("asks.start", text, _remedy_without_start(asks, grammar, run))


def _remedy_without_start(asks: Shift, grammar: Grammar, run: RunConfig) -> str:
    """Return the changes that predict the first token, or that give it where possible."""
    remedy, schedule = "set it to true", grammar.schedule
    if schedule.differs_by_image or grammar.num_tokens(run) == 1 or grammar.transform is not None:
        return remedy
    if grammar.condition is not None and grammar.condition.kind != "labels":
        return remedy
    place = "" if asks.place == "content" else " and {asks.place} to content"
    return f"{remedy}, or {{schedule.prefix}} to 1{place}"


@check_asking.register
def _(asks: Mask, grammar: Grammar, run: RunConfig) -> Faults:
    if grammar.positions == "none":
        text = "none makes all tokens that mask asks for indistinguishable"
        yield Fault("model.positions", text, f"set it to {added_positions(run)}")
    if asks.filler == "zero_token" and grammar.reads.is_discrete:
        text = f"zero_token does not exist for {grammar.reads.kind}"
        yield Fault("asks.filler", text, "set it to vector or zero_embedding")
    if asks.marks and run.model.hidden_size % 2:
        text = f"{run.model.hidden_size} is odd, and token and mask each take half of it"
        yield Fault("model.hidden_size", text, f"set it to {run.model.hidden_size + 1}")


@check_asking.register
def _(asks: Query, grammar: Grammar, run: RunConfig) -> Faults:
    if asks.streams == "two":
        return
    count, schedule = grammar.num_tokens(run), grammar.schedule
    if not grammar.num_front and not asks.start:
        text = "streams one needs a row before the first token, to predict it"
        yield Fault("asks.start", text, "set it to true")
    if not schedule.is_one_by_one(count):
        text = f"must be fixed with num_groups {count} for streams one, one token a group"
        remedy = f"{{schedule.num_groups}} to {count}"
        if schedule.kind == "groups" and schedule.boundaries is not None:
            # `fixed` does not take them.
            remedy = f"{{schedule.boundaries}} to null, {remedy}"
        yield Fault("schedule.length", text, f"set {remedy} and {{schedule.length}} to fixed")


@check_asking.register
def _(asks: Instruct, grammar: Grammar, run: RunConfig) -> Faults:
    if grammar.positions == "none":
        text = "none gives the rows of asks instruct no places to hold"
        kinds = "" if asks.zero_start else f"{added_positions(run)}, "
        remedy = f"set it to {kinds}rope_1d or rope_2d"
        yield Fault("model.positions", text, remedy)
    yield from _check_zero_start(asks, grammar)


def _check_zero_start(asks: Shift | Instruct, grammar: Grammar) -> Faults:
    """Check that the start token's queries and keys would be rotated."""
    if not asks.zero_start:
        return
    text = ""
    if grammar.positions not in ROTARY:
        text = f"positions of kind {grammar.positions} do not rotate queries and keys"
    elif isinstance(asks, Shift) and not (asks.start and asks.place == "content"):
        text = "true needs a start token with a place of its own: {asks.start} true and"
        text += " {asks.place} content"
    if text:
        yield Fault("asks.zero_start", text, "set it to false")


@check_asking.register
def _(asks: InContext, grammar: Grammar, run: RunConfig) -> Faults:
    """Check that only tokens with a given position have a position encoding.

    In fine-tuning without the paper's own loss, all tokens may have one.
    """
    assert isinstance(grammar.schedule, Context)
    given, count = asks.given_ratio, grammar.num_tokens(run)
    context = context_size(count, grammar.schedule.mask_ratio)
    kind, shows_all_positions = grammar.positions, run.classifies_only
    if given and kind not in ADDED and not shows_all_positions:
        text = f"{given} of the patches are given their position, which {kind} cannot encode"
        yield Fault("asks.given_ratio", text, "set model.positions to learned or sincos")
    if given and round(given * count) >= context:
        text = f"{given} leaves no context token without its position"
        # The number of given positions is rounded.
        lower = f"lower it below {(context - 0.5) / count:g}, or " if context > 1 else ""
        yield Fault("asks.given_ratio", text, f"{lower}set it to 0")
    if kind == "none":
        return
    if not given and not shows_all_positions:
        text = f"{kind} reveals what the model has to predict; leave it out"
        yield Fault("model.positions", text, "set it to none")
    elif kind not in (*ADDED, "relative_2d") and not given:
        known = ", ".join((*ADDED, "relative_2d"))
        text = f"{kind} does not support sets of patches"
        yield Fault("model.positions", text, f"set it to {known} or none")


@check_asking.register
def _(asks: Visible, grammar: Grammar, run: RunConfig) -> Faults:
    """Check that some tokens are hidden from the encoder, and the sizes of its decoder."""
    count, schedule = grammar.num_tokens(run), grammar.schedule
    if count == 1:
        text = "an encoder that sees only some tokens needs at least two, and images have one"
        remedy = "use smaller tokens, or set {schedule.kind} to masked and {asks.kind} to mask"
        yield Fault("schedule.kind", text, remedy)
        return
    if isinstance(schedule, Rounds):
        yield from _check_rounds(schedule, grammar, count)
    elif isinstance(schedule, Context) and context_size(count, schedule.mask_ratio) == count:
        text = f"{schedule.mask_ratio} of {count} tokens hides none"
        yield Fault("schedule.mask_ratio", text, f"set it to {math.ceil(1000 / count) / 1000:g}")
    if grammar.positions not in ADDED:
        text = f"{grammar.positions} does not reach the decoder"
        yield Fault("model.positions", text, "set it to learned or sincos")
    if run.finetune is not None and run.finetune.generative_weight:
        text = "needs hidden patches for the paper's own loss, and all patches for classes"
        yield Fault("finetune.generative_weight", text, "set it to 0")
    yield from _check_decoder(asks, run)


def _check_rounds(schedule: Rounds, grammar: Grammar, count: int) -> Faults:
    """Check that the encoder sees tokens in training, and has rows before any token is known."""
    if schedule.chosen == "confidence":
        text = "confidence keeps tokens at any position, and asks visible keeps them in order"
        yield Fault("schedule.chosen", text, "set it to order")
    if not schedule.shown(count)[1]:
        text = f"{schedule.least_masking:g} hides all {count} tokens of every image"
        yield Fault("schedule.least_masking", text, "use smaller tokens, or set it to 0")
    if not grammar.num_front:
        text = "leaves the encoder without rows in the first round of generation"
        if grammar.condition is None:
            yield Fault("condition", f"null {text}", "set {condition.kind} to learned_tokens")
        else:
            yield Fault("condition.count", f"0 {text}", "set it to 1")


def _check_decoder(asks: Visible, run: RunConfig) -> Faults:
    """Check that heads divide the width, and that the layout divides them."""
    width, heads = asks.decoder.hidden_size, asks.decoder.num_attention_heads
    if width % heads or width % 4:
        unit = math.lcm(4, heads)
        text = f"{width} is not divisible by 4 and by num_attention_heads {heads}"
        remedy = f"set it to {-(-width // unit) * unit}"
        yield Fault("asks.decoder.hidden_size", text, remedy)
    if heads % run.parallel.head_parts:
        text = f"{heads} heads are not divisible by {run.parallel.head_parts_text}"
        remedy = f"set it to a multiple of {run.parallel.head_parts}"
        yield Fault("asks.decoder.num_attention_heads", text, remedy)
