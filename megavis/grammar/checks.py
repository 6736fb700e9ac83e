"""Which words fit each other, and the run.

Each word is checked against those before it, in the order tokens, schedule, asking, density,
condition, memory, transform; what depends on words that do not fit is not checked. A fault names
keys of the grammar in braces, which a paper replaces by its own (`grammar/paper.py`), and ends in
choices that work, so following it never leads back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megavis.config.schema import RunConfig
from megavis.grammar.boundaries import boundaries_error, context_size, max_groups
from megavis.grammar.grammar import Fault, Grammar
from megavis.grammar.words import (
    AnyTokens,
    AskWord,
    Colors,
    Context,
    Groups,
    Ids,
    InContext,
    Latents,
    LearnedTokens,
    Mask,
    OneByOne,
    Patches,
    Query,
    Shift,
    SquaredError,
    Visible,
)

_ADDED = ("learned", "sincos", "learned_sincos")
"""Positions that are added to the rows."""
_ASKS: tuple[type[AskWord], ...] = (Shift, Mask, Query, InContext, Visible)
_WITHOUT_CONDITION = "set {condition} to null"
_WITHOUT_MEMORY = "set {memory} to null"
_WITHOUT_TRANSFORM = "set {transform} to null"
_ONE_KIND = "set {predicts} to null"


Faults = Iterator[Fault]


def check(grammar: Grammar, run: RunConfig) -> Faults:
    """Yield a fault for each choice that does not fit."""
    if run.data.frames is None and not run.data.image_size:
        return  # Reported by the checks of `data`.
    wrong_tokens = next(_check_token_kinds(grammar, run), None)
    if wrong_tokens is not None:
        yield wrong_tokens
        return
    faults = [*_check_tokens(grammar, run), *_check_kinds(grammar)]
    yield from faults
    if faults:
        return
    rest = [*_check_schedule(grammar, run), *_check_asking(grammar, run)]
    rest += [*_check_positions(grammar, run), *_check_condition(grammar)]
    rest += [*_check_memory(grammar, run), *_check_transform(grammar)]
    yield from rest
    if not rest:
        yield from _check_rows(grammar, run)


# Tokens.


def _check_token_kinds(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that samples have the tokens that are read, and make those that are predicted."""
    reads, predicts = grammar.reads, grammar.predicts
    key, is_recorded = "reads.kind", run.data.frames is not None
    if reads.kind == "frames" and not is_recorded:
        text = "frames does not fit images"
        yield Fault(key, text, "give data.frames in place of data.image_size, or set it to patches")
    if reads.kind != "frames" and is_recorded:
        text = f"{reads.kind} does not fit recordings, which data.frames describes"
        yield Fault(key, text, "set it to frames")
    if predicts is None:
        return
    key = "predicts.kind"
    if reads.kind == "colors":
        text = "palette shards contain no images to make other tokens of"
        yield Fault("reads.kind", text, _ONE_KIND)
    if predicts.kind == "colors":
        yield Fault(key, "palette ids can be predicted only from palette ids", _ONE_KIND)
    if "frames" in (reads.kind, predicts.kind):
        yield Fault(key, "frames can be predicted only from frames", _ONE_KIND)
    if isinstance(grammar.asks, InContext):
        yield Fault(key, "is not used with asks in_context, which predicts places", _ONE_KIND)


def _check_tokens(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the sizes of the tokens, and that two kinds are made from the same images."""
    reads, predicts = grammar.reads, grammar.predicts
    own = [*_check_size("reads", reads, run)]
    yield from own
    if predicts is None:
        return
    for name, tokens in (("reads", reads), ("predicts", predicts)):
        if isinstance(tokens, Ids | Latents) and tokens.tokenizer is None:
            text = "must name the run folder of the tokenizer that encodes images"
            yield Fault(f"{name}.tokenizer", text, f"or {_ONE_KIND}")
    sizes = [*_check_size("predicts", predicts, run)]
    yield from sizes
    first, other = reads.grid(run.data), predicts.grid(run.data)
    if not sizes and not own and first != other:
        text = "has {} × {} tokens per image, but {{reads}} has {} × {}".format(*other, *first)
        remedy = f"set {{predicts.patch_size}} to {run.data.image_size // first[0]}"
        for name, tokens in (("reads", reads), ("predicts", predicts)):
            if isinstance(tokens, Latents) and tokens.stacked > 1:
                remedy = f"set {{{name}.stacked}} to 1"
        yield Fault("predicts", text, remedy)


def _check_size(name: str, tokens: AnyTokens, run: RunConfig) -> Faults:
    """Check that tokens tile the image, and that the tensor group divides a vocabulary."""
    side = run.data.image_size
    if isinstance(tokens, Patches | Ids | Latents) and side % tokens.patch_size:
        text = f"{tokens.patch_size} does not divide data.image_size {side}"
        sizes = nearest_divisors(tokens.patch_size, side)
        yield Fault(f"{name}.patch_size", text, f"set it to {sizes}")
    elif isinstance(tokens, Latents):
        yield from _check_latents(name, tokens, side // tokens.patch_size)
    if isinstance(tokens, Colors | Ids):
        yield from _check_vocabulary(name, tokens, run)


def _check_latents(name: str, tokens: Latents, side: int) -> Faults:
    if side % tokens.stacked:
        text = f"{tokens.stacked} does not divide the {side} latents of a row"
        sizes = nearest_divisors(tokens.stacked, side)
        yield Fault(f"{name}.stacked", text, f"set it to {sizes}")
    if tokens.tokenizer_beta is not None and tokens.tokenizer is None:
        text = f"needs {{{name}.tokenizer}}, the run of that VAE"
        yield Fault(f"{name}.tokenizer_beta", text, "name it, or set this to null")


def _check_vocabulary(name: str, tokens: Colors | Ids, run: RunConfig) -> Faults:
    size, tensor = tokens.vocabulary_size, run.parallel.tensor_model_parallel_size
    if size % tensor == 0:
        return
    # A palette may have fewer colours than there are logits, a codebook may not.
    remedy = f"set it to {size + -size % tensor}"
    if isinstance(tokens, Ids):
        remedy = "set parallel.tensor_model_parallel_size to 1"
        if run.parallel.sequence_parallel:
            remedy += " and parallel.sequence_parallel to false"
    text = f"{size} is not divisible by tensor_model_parallel_size {tensor}"
    yield Fault(f"{name}.vocabulary_size", text, remedy)


# Kinds of schedule, asking and density.


def _check_kinds(grammar: Grammar) -> Faults:
    """Check that schedule, asking and density fit each other and the tokens."""
    asks, schedule, kind = grammar.asks.kind, grammar.schedule.kind, grammar.predicted.kind
    can_ask = _fitting_asking(grammar)
    possible = [name for name, fitting in can_ask.items() if schedule in fitting]
    if asks == "in_context" and schedule == "context" and asks not in can_ask:
        text = f"positions of {grammar.reads.kind} cannot be predicted"
        other = "{schedule.kind} to one_by_one, masked, rounds or groups"
        if "visible" in can_ask:
            other = "{asks.kind} to visible"
        yield Fault("reads.kind", text, f"set it to patches, or {other}")
    elif not possible:
        text = f"{schedule} cannot predict {kind}, only places, or values with asks visible"
        remedy = "set {schedule.kind} to one_by_one, masked, rounds or groups"
        yield Fault("schedule.kind", text, remedy)
    elif schedule not in grammar.asks.schedules:
        fitting = one_of(grammar.asks.schedules)
        remedy = f"set {{asks.kind}} to {one_of(possible)}"
        if asks in can_ask:
            remedy += f", or {{schedule.kind}} to {fitting}"
        text = f"{asks} needs schedule {fitting}, not {schedule}"
        yield Fault("asks.kind", text, remedy)
    else:
        yield from _check_density(grammar)


def _fitting_asking(grammar: Grammar) -> dict[str, tuple[str, ...]]:
    """Return the kinds of asking that can predict the tokens, and the schedules of each."""
    has_places = grammar.predicts is None and grammar.reads.kind in ("patches", "frames")
    fits = {"in_context": has_places, "visible": not grammar.predicted.is_discrete}
    kinds = {each: each.model_fields["kind"].annotation.__args__[0] for each in _ASKS}  # type: ignore[union-attr]
    return {kind: word.schedules for word, kind in kinds.items() if fits.get(kind, True)}


def _check_density(grammar: Grammar) -> Faults:
    asks, density, kind = grammar.asks.kind, grammar.density, grammar.predicted.kind
    fitting: tuple[str, ...] = ("squared_error", "gaussian_mixture", "correlated_gaussian")
    if asks == "in_context":
        fitting = ("place",)
    elif grammar.predicted.is_discrete:
        fitting = ("categorical",)
    elif asks != "visible":
        fitting = (*fitting, "diffusion")
    if density.kind in fitting:
        if isinstance(density, SquaredError) and (density.decoder, asks) == ("mlp", "visible"):
            text = "mlp does not read the decoder's blocks of asks visible"
            yield Fault("density.decoder", text, "set it to linear")
        return
    text, remedy = f"{density.kind} cannot predict {kind}", f"set it to {one_of(fitting)}"
    if "place" in (density.kind, *fitting):
        text = f"{density.kind} cannot be combined with asks {asks}"
    elif (asks, density.kind) == ("visible", "diffusion"):
        text = "diffusion is not supported with asks visible"
    if density.kind == "place" and "in_context" in _fitting_asking(grammar):
        remedy += ", or {asks.kind} to in_context"
        remedy += "" if asks == "visible" else " and {schedule.kind} to context"
    yield Fault("density.kind", text, remedy)


# Keys of schedule and asking.


def _check_schedule(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the keys of the schedule against the number of tokens."""
    schedule, grid = grammar.schedule, grammar.reads.grid(run.data)
    if isinstance(schedule, Groups):
        yield from _check_groups(schedule, grid[0] * grid[1])
    if isinstance(schedule, OneByOne):
        faults = [*_check_order(schedule, grid)]
        yield from faults
        if schedule.prefix and not faults:
            yield from _check_prefix(grammar, schedule, grid[0] * grid[1])


def _check_groups(schedule: Groups, count: int) -> Faults:
    boundaries, key = schedule.boundaries, "schedule.boundaries"
    if boundaries is None and schedule.length == "given":
        text = "must list where groups end if {schedule.length} is given"
        yield Fault(key, text, "list them, or set {schedule.length} to random")
    elif boundaries is not None and schedule.length != "given":
        text = f"is for {{schedule.length}} given, not {schedule.length}"
        yield Fault(key, text, "set it to null, or {schedule.length} to given")
    elif boundaries is not None:
        fault = boundaries_error(boundaries, count)
        if fault:
            remedy = "correct them, or set it to null and {schedule.length} to random"
            yield Fault(key, fault, remedy)
    elif schedule.length != "given":
        most = max_groups(schedule.length, count)
        if schedule.num_groups > most:
            text = f"{schedule.num_groups} groups cannot be cut from {count} tokens with"
            text = f"{text} {schedule.length} length"
            remedy = f"use at most {most}: set it to {most}"
            if not most:
                remedy = "use smaller tokens, or set {schedule.kind} to one_by_one"
            yield Fault("schedule.num_groups", text, remedy)


def _check_order(schedule: OneByOne, grid: tuple[int, int]) -> Faults:
    (rows, columns), order = grid, schedule.order
    if not isinstance(order, str):
        if len(order) != rows * columns:
            text = f"lists {len(order)} tokens, and images have {rows * columns}"
            yield Fault("schedule.order", text, "list each of them once, or set it to raster")
    elif rows != columns and order not in ("raster", "random"):
        text = f"{order} needs a square grid, and tokens are {rows} × {columns}"
        yield Fault("schedule.order", text, "set it to raster or random")
    elif order in ("nested_raster", "round_robin") and rows % schedule.order_block:
        text = f"{schedule.order_block} does not divide a grid of {rows} × {columns} tokens"
        sizes = nearest_divisors(schedule.order_block, rows)
        yield Fault("schedule.order_block", text, f"set it to {sizes}")


def _check_prefix(grammar: Grammar, schedule: OneByOne, count: int) -> Faults:
    key, asks = "schedule.prefix", grammar.asks
    if schedule.differs_by_image:
        text = "a prefix needs an order that is the same for all images"
        yield Fault(key, text, "set it to 0, or {schedule.order} to raster")
    elif isinstance(asks, Shift) and asks.place != "content":
        text = "a prefix needs asks of kind shift with place content"
        yield Fault(key, text, "set it to 0, or {asks.place} to content")
    elif not isinstance(asks, Shift):
        text, remedy = "a prefix needs asks of kind shift with place content", "set it to 0"
        if grammar.condition is None or grammar.condition.kind == "labels":
            remedy += ", or {asks.kind} to shift and {asks.place} to content"
        yield Fault(key, text, remedy)
    elif schedule.prefix >= count:
        text = f"{schedule.prefix} leaves nothing to predict of {count} tokens"
        yield Fault(key, text, f"set it to {count - 1} or less")


def _check_asking(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the keys of the asking kind, and the positions that its rows need."""
    asks = grammar.asks
    if isinstance(asks, Shift):
        yield from _check_shift(grammar, asks, run)
    if isinstance(asks, Mask):
        yield from _check_mask(grammar, asks, run)
    if isinstance(asks, Query):
        yield from _check_query(grammar, asks, run)
    if isinstance(asks, InContext):
        yield from _check_placed(grammar, asks, run)
    if isinstance(asks, Visible):
        yield from _check_visible(grammar, asks, run)


def _added(run: RunConfig) -> str:
    return "learned" if run.model.hidden_size % 4 else "learned or sincos"


def _check_shift(grammar: Grammar, asks: Shift, run: RunConfig) -> Faults:
    schedule, place = grammar.schedule, asks.place
    is_random = isinstance(schedule, OneByOne) and schedule.differs_by_image
    if place != "both" and is_random:
        text = f"{place} does not encode the position of the"
        text += f" {'held' if place == 'asked' else 'next'} token, which differs by image in"
        remedy = "set it to both, or {asks.kind} to query"
        yield Fault("asks.place", f"{text} order random", remedy)
    if place == "both" and grammar.positions not in _ADDED:
        remedy = f"set it to {_added(run)}"
        remedy += "" if is_random else ", or {asks.place} to asked or content"
        yield Fault(
            "model.positions", f"{grammar.positions} cannot add two places to a row", remedy
        )


def _check_mask(grammar: Grammar, asks: Mask, run: RunConfig) -> Faults:
    if grammar.positions == "none":
        text = "none makes all tokens that mask asks for indistinguishable"
        yield Fault("model.positions", text, f"set it to {_added(run)}")
    if asks.filler == "zero_token" and grammar.reads.is_discrete:
        text = f"zero_token is no value of {grammar.reads.kind}"
        yield Fault("asks.filler", text, "set it to vector or zero_embedding")
    if asks.marks and run.model.hidden_size % 2:
        text = f"{run.model.hidden_size} is odd, and token and mask take half of it each"
        yield Fault("model.hidden_size", text, f"set it to {run.model.hidden_size + 1}")


def _check_query(grammar: Grammar, asks: Query, run: RunConfig) -> Faults:
    if asks.streams == "two":
        return
    schedule, count = grammar.schedule, grammar.num_tokens(run)
    if not grammar.num_front and not asks.start:
        text = "streams one needs a row before the first token, to predict it"
        yield Fault("asks.start", text, "set it to true")
    if isinstance(schedule, Groups) and (schedule.length, schedule.num_groups) != ("fixed", count):
        text = f"must be fixed with num_groups {count} for streams one, one token a group"
        remedy = f"set {{schedule.length}} to fixed and {{schedule.num_groups}} to {count}"
        yield Fault("schedule.length", text, remedy)


def _check_placed(grammar: Grammar, asks: InContext, run: RunConfig) -> Faults:
    """Check that only tokens with a given position have a position encoding.

    In fine-tuning without the paper's own loss, all tokens may have one.
    """
    assert isinstance(grammar.schedule, Context)
    given, context = asks.given_ratio, 1.0 - grammar.schedule.mask_ratio
    kind, shows_all_positions = grammar.positions, run.classifies_only
    if given and kind not in _ADDED and not shows_all_positions:
        text = f"{given} of the patches are given their position, and {kind} cannot say it"
        yield Fault("asks.given_ratio", text, "set model.positions to learned or sincos")
    if given >= context and given:
        text = f"{given} leaves no context token without its position"
        yield Fault("asks.given_ratio", text, f"lower it below {context:g}, or set it to 0")
    if kind == "none":
        return
    if not given and not shows_all_positions:
        text = f"{kind} reveals what the model has to predict; leave it out"
        yield Fault("model.positions", text, "set it to none")
    elif kind not in (*_ADDED, "relative_2d") and not given:
        known = ", ".join((*_ADDED, "relative_2d"))
        text = f"{kind} is not for sets of patches"
        yield Fault("model.positions", text, f"set it to {known} or none")


def _check_visible(grammar: Grammar, asks: Visible, run: RunConfig) -> Faults:
    """Check that an encoder lacks some tokens, and the sizes of its decoder."""
    assert isinstance(grammar.schedule, Context)
    count, ratio = grammar.num_tokens(run), grammar.schedule.mask_ratio
    if count == 1:
        text = "an encoder that sees some tokens needs two or more, and images have one"
        remedy = "use smaller tokens, or set {schedule.kind} to masked and {asks.kind} to mask"
        yield Fault("schedule.kind", text, remedy)
        return
    if context_size(count, ratio) == count:
        text = f"{ratio} of {count} tokens hides none"
        remedy = f"use smaller ones, or set it to {math.ceil(1000 / count) / 1000:g} or more"
        yield Fault("schedule.mask_ratio", text, remedy)
    if grammar.positions not in _ADDED:
        text = f"{grammar.positions} does not reach the decoder"
        yield Fault("model.positions", text, "set it to learned or sincos")
    if run.finetune is not None and run.finetune.generative_weight:
        text = "needs patches hidden for the paper's own loss, and all seen for classes"
        yield Fault("finetune.generative_weight", text, "set it to 0")
    yield from _check_decoder(asks, run)


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


def _check_positions(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that the width fits the paper's own positions, and who can use relative ones."""
    kind, model = grammar.positions, run.model
    if kind == "relative_2d" and grammar.asks.kind != "in_context":
        text = f"relative_2d is for asks in_context, not {grammar.asks.kind}"
        yield Fault("model.positions", text, f"set it to {_added(run)}")
    if model.positions is not None:
        return  # `config/checks.py` checks what is given.
    if kind in ("sincos", "learned_sincos") and model.hidden_size % 4:
        text = f"{model.hidden_size} is not divisible by 4, as {kind} positions need"
        yield Fault("model.hidden_size", text, "change it, or set model.positions to learned")
    unit = {"rope_1d": 2, "rope_2d": 4}.get(kind, 1)
    if model.head_size % unit:
        text = f"{kind}, the default here, needs a head width divisible by {unit}, not"
        yield Fault("model.positions", f"{text} {model.head_size}", "set it to learned")


# Condition, memory and transform.


def _check_condition(grammar: Grammar) -> Faults:
    """Check the tokens and asking of a conditional model."""
    condition, asks, reads = grammar.condition, grammar.asks, grammar.reads.kind
    if condition is None:
        return
    if condition.kind != "labels" and not asks.has_front:
        text = f"{condition.kind} stands in front of all rows, and asks {asks.kind} has no such row"
        remedy = _WITHOUT_CONDITION
        schedule = grammar.schedule
        if isinstance(schedule, OneByOne) and not schedule.prefix:
            remedy += ", or {asks.kind} to query"
        yield Fault("condition.kind", text, remedy)
    if condition.kind == "pooled_features":
        if reads != "patches":
            text = f"features are computed from images, which {reads} shards lack"
            yield Fault("reads.kind", text, f"{_WITHOUT_CONDITION}{_on_images(reads)}")
        if asks.kind == "in_context":
            text = "features of the image would reveal the position of every token"
            yield Fault("condition.kind", text, _WITHOUT_CONDITION)


def _on_images(reads: str) -> str:
    return "" if reads == "frames" else ", or {reads.kind} to patches"


def _check_memory(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the tokens, asking and sizes of a model with an encoder."""
    memory, reads, asks = grammar.memory, grammar.reads.kind, grammar.asks.kind
    if memory is None:
        return
    if asks == "visible":
        text = "is not available to the decoder of asks visible, which predicts"
        yield Fault("memory", text, _WITHOUT_MEMORY)
    elif asks == "in_context":
        text = "would reveal the position of every token; asks is in_context"
        yield Fault("memory", text, _WITHOUT_MEMORY)
    elif reads in ("colors", "frames"):
        text = f"an encoder reads images, which {reads} shards lack"
        yield Fault("reads.kind", text, f"{_WITHOUT_MEMORY}{_on_images(reads)}")
    else:
        yield from _check_encoder(grammar, run)


def _check_encoder(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that an encoder's patches tile the image, and that the layout divides its sizes."""
    memory, parts = grammar.memory, run.parallel.head_parts
    assert memory is not None
    side, key = run.data.image_size, "memory.num_attention_heads"
    if side % memory.patch_size:
        text = f"{memory.patch_size} does not divide data.image_size {side}"
        sizes = nearest_divisors(memory.patch_size, side)
        yield Fault("memory.patch_size", text, f"set it to {sizes}")
        return
    width = memory.hidden_size or run.model.hidden_size
    heads = memory.num_attention_heads or run.model.num_attention_heads
    if width % parts:
        text = f"{width} is not divisible by {run.parallel.head_parts_text}"
        yield Fault("memory.hidden_size", text, f"set it to {-(-width // parts) * parts}")
    elif width % heads:
        text = f"width {width} does not divide by {heads} heads"
        yield Fault(key, text, f"set it to {nearest_divisors(heads, width, parts)}")
    elif heads % parts:
        text = f"{heads} heads do not divide by {run.parallel.head_parts_text}"
        yield Fault(key, text, f"set it to {nearest_divisors(heads, width, parts)}")
    count = (side // memory.patch_size) ** 2
    remedy = "change {memory.patch_size}"
    yield from check_split(run, count, what=f"{count} patches of the encoder", remedy=remedy)


def _check_transform(grammar: Grammar) -> Faults:
    """Check that an adapter is used for next-token prediction of latents."""
    transform, reads, schedule = grammar.transform, grammar.reads, grammar.schedule
    if transform is None:
        return
    if not isinstance(reads, Latents) or grammar.predicts is not None:
        text = "adapter needs latents that are both read and predicted"
        yield Fault("transform", text, _WITHOUT_TRANSFORM)
        return
    in_raster = isinstance(schedule, OneByOne) and schedule.order == "raster"
    shifts = isinstance(grammar.asks, Shift) and grammar.asks.place == "asked"
    masks = grammar.asks.kind == "mask" and grammar.density.has_likelihood
    if not (in_raster and shifts and grammar.density.has_likelihood or masks):
        text = "adapter needs schedule one_by_one in raster order and asks of kind shift with place"
        text = f"{text} asked, or asks of kind mask, and a density of Gaussians"
        yield Fault("transform", text, _WITHOUT_TRANSFORM)
        return
    yield from _check_adapter(reads.width, transform.bottleneck)


def _check_adapter(width: int, bottleneck: int | None) -> Faults:
    """Check that a token has two halves to couple, and that norms' groups divide the channels."""
    half, groups = width // 2, min(32, width // 2)
    hidden = (bottleneck or 4 * width) // 2
    if width % 2:
        text = f"an adapter couples halves of a token, but {width} channels are odd"
        yield Fault("transform.blocks", text, _WITHOUT_TRANSFORM)
    elif half % groups:
        text = f"an adapter couples halves of a token, but half of {width} channels"
        text = f"{text} is not divisible by {groups}"
        yield Fault("transform.blocks", text, _WITHOUT_TRANSFORM)
    elif hidden % groups or not hidden:
        text = f"half of it must be divisible by {groups}, as half of a token's channels is"
        remedy = f"set it to {2 * groups * max(1, round(hidden / groups))}"
        yield Fault("transform.bottleneck", text, remedy)


# Rows, which layouts divide.


def _check_rows(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that sequence and context parallelism divide the rows."""
    count = grammar.num_tokens(run)
    rows = grammar.rows(count, for_features=run.classifies_only)
    what = f"{rows.blocks} rows"
    if rows.decoder:
        what = f"{rows.blocks} rows of the encoder and {rows.decoder} of the decoder"
    elif rows.head < rows.blocks:
        what = f"{rows.blocks} rows, {rows.head} of them queries,"
    remedy = ""
    if isinstance(grammar.condition, LearnedTokens):
        remedy = "change {condition.count}"
    if rows.decoder:
        remedy = f"change {{schedule.mask_ratio}}{' or ' if remedy else ''}{remedy[7:]}"
    # The decoder has as many rows as its head reads.
    yield from check_split(run, rows.blocks, rows.head, what=what, remedy=remedy)


def check_split(run: RunConfig, *counts: int, what: str, remedy: str) -> Faults:
    """Check that the layout divides rows, under sequence and context parallelism.

    Args:
        counts: counts of rows, each of which is split.
        what: description of the rows, with their number, for the message.
        remedy: what to do about it besides doing without the key, for the message.
    """
    parallel, context = run.parallel, run.parallel.context_parallel_size
    remedy += ", or " if remedy else ""
    if any(count % context for count in counts):
        text = f"{what} are not divisible by context_parallel_size {context}"
        yield Fault("parallel.context_parallel_size", text, f"{remedy}set it to 1")
    elif any(count % parallel.token_parts for count in counts):
        text = f"{what} are not divisible by {parallel.head_parts_text}"
        yield Fault("parallel.sequence_parallel", text, f"{remedy}set it to false")


# Words.


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


def one_of(words: Iterable[str]) -> str:
    """Join words by commas and "or"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
