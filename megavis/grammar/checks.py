"""Which words fit each other, and the run.

Each word is checked against those before it, in the order tokens, schedule, asking, density,
condition, memory, transform; what depends on words that do not fit is not checked. A fault names
keys of the grammar in braces, which a paper replaces by its own (`grammar/paper.py`), and ends in
choices that work if nothing else is wrong, so that messages do not lead back and forth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megavis.config.schema import RunConfig
from megavis.grammar.faults import Fault, Faults, nearest_divisors, one_of
from megavis.grammar.grammar import Grammar
from megavis.grammar.sequence_checks import added_positions, check_asking, check_schedule
from megavis.grammar.token_checks import check_token_kinds, check_tokens
from megavis.grammar.words import (
    AskWord,
    Diffusion,
    InContext,
    Instruct,
    Labels,
    LearnedTokens,
    Mask,
    Patches,
    Query,
    Shift,
    SquaredError,
    SquareTokens,
    Visible,
)

_ASKS: tuple[type[AskWord], ...] = (Shift, Mask, Query, InContext, Visible, Instruct)
_SCHEDULES = {str(each.model_fields["kind"].default): each.schedules for each in _ASKS}
_WITHOUT_CONDITION = "set {condition} to null"
_WITHOUT_MEMORY = "set {memory} to null"
_WITHOUT_TRANSFORM = "set {transform} to null"


def check(grammar: Grammar, run: RunConfig, *, tries: bool = True) -> Faults:
    """Yield a fault for each choice that does not fit.

    Args:
        tries: try the kinds of words that a remedy names, and name those that fit the rest.
    """
    if run.data.frames is None and not run.data.image_size:
        return  # Reported by the checks of `data`.
    wrong_tokens = next(check_token_kinds(grammar, run), None)
    if wrong_tokens is not None:
        yield wrong_tokens
        return
    faults = [*check_tokens(grammar, run), *_check_kinds(grammar, run, tries)]
    yield from faults
    if faults:
        return
    rest = [
        *check_schedule(grammar.schedule, grammar, run),
        *check_asking(grammar.asks, grammar, run),
    ]
    rest += [*_check_decoder(grammar, run)]
    rest += [*_check_positions(grammar, run), *_check_condition(grammar, run, tries)]
    rest += [*_check_memory(grammar, run, tries), *_check_transform(grammar)]
    rest += _check_dense(grammar, run)
    yield from rest
    if not rest:
        yield from _check_rows(grammar, run)


# Kinds of schedule, asking and density.


def _check_kinds(grammar: Grammar, run: RunConfig, tries: bool) -> Faults:
    """Check that schedule, asking and density fit each other and the tokens."""
    asks, schedule = grammar.asks.kind, grammar.schedule.kind
    can_ask = _fitting_asking(grammar)
    if schedule not in grammar.asks.schedules:
        needed = grammar.asks.schedules
        possible = [name for name, schedules in can_ask.items() if schedule in schedules]
        choices: dict[str, Sequence[str]] = {
            "asks": possible,
            "schedule": needed if asks in can_ask else (),
        }
        if tries:
            fitting = {
                word: _that_fit(grammar, run, word, kinds) for word, kinds in choices.items()
            }
            choices = {**fitting} if any(fitting.values()) else choices
        remedy = ", or ".join(
            f"{{{word}.kind}} to {one_of(kinds)}" for word, kinds in choices.items() if kinds
        )
        text = f"{asks} needs schedule {one_of(needed)}, not {schedule}"
        yield Fault("asks.kind", text, f"set {remedy}")
    elif asks not in can_ask:
        text = f"positions of {grammar.reads.kind} cannot be predicted"
        yield Fault("reads.kind", text, "set it to patches, or {asks.kind} to visible")
    else:
        yield from _check_density(grammar, run, tries)


def _that_fit(grammar: Grammar, run: RunConfig, word: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return those of some kinds of a word that, with their default keys, fit all other words."""
    found = []
    for kind in kinds:
        keys: dict[str, Any] = {"kind": kind}
        if word == "reads" and isinstance(grammar.reads, SquareTokens):
            keys["patch_size"] = grammar.reads.patch_size
        words: dict[str, Any] = {word: keys}
        if word == "asks":
            default = "none" if kind == "in_context" else "learned"
            words["positions"] = run.model.positions or default
        tried = Grammar.model_validate({**dict(grammar), **words})
        if not any(check(tried, run, tries=False)):
            found.append(kind)
    return tuple(found)


def _fitting_asking(grammar: Grammar) -> dict[str, tuple[str, ...]]:
    """Return the kinds of asking that can predict the tokens, and the schedules of each."""
    has_places = grammar.predicts is None and grammar.reads.kind in ("patches", "frames")
    return {kind: each for kind, each in _SCHEDULES.items() if kind != "in_context" or has_places}


def _check_density(grammar: Grammar, run: RunConfig, tries: bool) -> Faults:
    asks, density, kind = grammar.asks.kind, grammar.density, grammar.predicted.kind
    gaussians = ("gaussian_mixture", "correlated_gaussian")
    fitting: tuple[str, ...] = ("squared_error", *gaussians, "diffusion")
    if asks == "in_context":
        fitting = ("place",)
    elif grammar.predicted.is_discrete:
        fitting = ("categorical",)
    if density.kind in fitting:
        return
    if tries:
        fitting = _that_fit(grammar, run, "density", fitting) or fitting
    text, remedy = f"{density.kind} cannot predict {kind}", f"set it to {one_of(fitting)}"
    if "place" in (density.kind, *fitting):
        text = f"{density.kind} cannot be combined with asks {asks}"
    if density.kind == "place" and "in_context" in _fitting_asking(grammar):
        remedy += ", or {asks.kind} to in_context"
        remedy += "" if asks == "visible" else " and {schedule.kind} to context"
        if run.model.positions not in (None, "none"):
            remedy += " and model.positions to none"
    yield Fault("density.kind", text, remedy)


def _check_decoder(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the width and the positions of a decoder in the head."""
    density, tensor = grammar.density, run.parallel.tensor_model_parallel_size
    if isinstance(density, Diffusion):
        yield from _check_denoiser(density, run)
    if not isinstance(density, SquaredError):
        return
    has_decoder = density.decoder != "linear"
    if grammar.asks.kind == "visible" and has_decoder:
        yield _two_decoders(density)
        return
    width, unit = density.decoder_width, 2 if grammar.predicted.grid(run.data)[0] == 1 else 4
    if not has_decoder:
        mlp = "" if grammar.asks.kind == "visible" else ", or {density.decoder} to mlp"
        if width is not None:
            text = f"{width} is the width of an mlp decoder, not of a linear one"
            yield Fault("density.decoder_width", text, f"set it to null{mlp}")
        if density.decoder_positions:
            text = "true adds positions before an mlp decoder, not before a linear one"
            yield Fault("density.decoder_positions", text, f"set it to false{mlp}")
        return
    if width is not None and 4 * width % tensor:
        text = f"4 · {width} is not divisible by tensor_model_parallel_size {tensor}"
        yield Fault("density.decoder_width", text, f"set it to {width + -width % tensor}")
    elif density.decoder_positions and (width or run.model.hidden_size) % unit:
        text = f"the width {width or run.model.hidden_size} of the decoder is not divisible by"
        yield Fault("density.decoder_positions", f"{text} {unit}", "set it to false")


def _two_decoders(density: SquaredError) -> Fault:
    text = f"{density.decoder} cannot follow the decoder blocks of asks visible"
    remedy = "set it to linear"
    if density.decoder_width is not None:
        remedy += " and {density.decoder_width} to null"
    if density.decoder_positions:
        remedy += " and {density.decoder_positions} to false"
    return Fault("density.decoder", text, remedy)


def _check_denoiser(density: Diffusion, run: RunConfig) -> Faults:
    """Check the decoder and the noise levels of a diffusion density."""
    width, tensor = density.decoder_width, run.parallel.tensor_model_parallel_size
    if width is not None and density.decoder in ("linear", "transformer"):
        text = f"{width} is the width of an mlp or modulated_mlp decoder"
        fits = {"mlp": not 4 * width % tensor, "modulated_mlp": not density.condition_on_gamma}
        remedy = "set it to null"
        if any(fits.values()):
            kinds = one_of(kind for kind, fit in fits.items() if fit)
            remedy += f", or {{density.decoder}} to {kinds}"
        yield Fault("density.decoder_width", f"{text}, not of a {density.decoder} one", remedy)
    elif width is not None and density.decoder == "mlp" and 4 * width % tensor:
        text = f"4 · {width} is not divisible by tensor_model_parallel_size {tensor}"
        yield Fault("density.decoder_width", text, f"set it to {width + -width % tensor}")
    if density.condition_on_gamma and density.decoder == "modulated_mlp":
        text = "true appends γ to the noisy token, and a modulated_mlp has it already"
        yield Fault("density.condition_on_gamma", text, "set it to false")
    if density.noise == "beta" and density.learns_variance:
        remedy = "set it to false, or {density.noise} to cosine"
        if density.sampling_steps > density.noise_steps:
            remedy += f" and {{density.sampling_steps}} to {density.noise_steps}"
        yield Fault("density.learns_variance", "true needs steps of a cosine schedule", remedy)
    if density.noise == "cosine" and density.sampling_steps > density.noise_steps:
        count = density.noise_steps
        text = f"{density.sampling_steps} is more than {{density.noise_steps}} {count}"
        yield Fault("density.sampling_steps", text, f"set it to {count}")


def _check_positions(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that the width fits the default positions, and that relative ones are supported."""
    kind, model = grammar.positions, run.model
    if kind == "relative_2d" and grammar.asks.kind != "in_context":
        text = "relative_2d is for models that predict positions"
        yield Fault("model.positions", text, f"set it to {added_positions(run)}")
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


def _check_condition(grammar: Grammar, run: RunConfig, tries: bool) -> Faults:
    """Check the tokens and asking of a conditional model."""
    condition, asks, reads = grammar.condition, grammar.asks, grammar.reads.kind
    if condition is None:
        return
    if condition.kind != "labels" and not asks.has_front:
        text = f"{condition.kind} stands in front of all rows, and asks {asks.kind} has no such row"
        remedy = _WITHOUT_CONDITION
        if grammar.schedule.is_sequential and not grammar.schedule.num_given:
            remedy += ", or {asks.kind} to query"
        yield Fault("condition.kind", text, remedy)
    if isinstance(condition, Labels) and condition.count > 1 and not asks.has_front:
        text = (
            f"{condition.count} rows cannot stand in place of the start token of asks {asks.kind}"
        )
        yield Fault("condition.count", text, "set it to 1")
    if condition.kind == "labels" and asks.kind == "shift" and not asks.start:
        text = "labels stands in place of the start token, which asks.start false leaves out"
        yield Fault("condition.kind", text, f"{_WITHOUT_CONDITION}, or {{asks.start}} to true")
    yield from _check_modulation(grammar)
    if condition.kind == "pooled_features":
        if reads != "patches":
            text = f"features are computed from images, which {reads} shards lack"
            remedy = f"{_WITHOUT_CONDITION}{_on_images(grammar, run, tries)}"
            yield Fault("reads.kind", text, remedy)
        if asks.kind == "in_context":
            text = "features of the image would reveal the position of every token"
            yield Fault("condition.kind", text, _WITHOUT_CONDITION)
        elif grammar.memory is not None:
            text = "pooled_features and {memory} each need the image that the model is given"
            yield Fault("condition.kind", text, f"{_WITHOUT_CONDITION}, or {{memory}} to null")


def _check_modulation(grammar: Grammar) -> Faults:
    """Check that there is only one stack, and that row numbers are the same in generation."""
    condition, asks, key = grammar.condition, grammar.asks.kind, "condition.modulation"
    if not isinstance(condition, Labels) or condition.modulation == "none":
        return
    if asks == "visible":
        text = f"{condition.modulation} does not reach the decoder of asks visible"
        yield Fault(key, text, "set it to none")
    elif condition.modulation == "class_and_row" and asks not in ("shift", "mask", "in_context"):
        text = f"rows of asks {asks} are numbered differently in generation and in training"
        yield Fault(key, text, "set it to none" if grammar.memory else "set it to class or none")
    elif grammar.memory is not None:
        text = f"{condition.modulation} cannot be combined with the encoder of {{memory}}"
        yield Fault(key, text, "set it to none, or {memory} to null")


def _on_images(grammar: Grammar, run: RunConfig, tries: bool) -> str:
    """Return the choice of reading patches instead, where the other words allow it."""
    if not tries or not _that_fit(grammar, run, "reads", ["patches"]):
        return ""
    return ", or {reads.kind} to patches"


def _check_memory(grammar: Grammar, run: RunConfig, tries: bool) -> Faults:
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
        remedy = f"{_WITHOUT_MEMORY}{_on_images(grammar, run, tries)}"
        yield Fault("reads.kind", text, remedy)
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
    width = memory.hidden_size or run.model.hidden_size
    heads = memory.num_attention_heads or run.model.num_attention_heads
    if width % parts:
        text = f"{width} is not divisible by {run.parallel.head_parts_text}"
        divided = -(-heads // parts) * parts
        unit = math.lcm(parts, divided)
        remedy = f"set it to {-(-width // unit) * unit}"
        remedy += "" if heads == divided else f" and {{{key}}} to {divided}"
        yield Fault("memory.hidden_size", text, remedy)
    elif width % heads:
        text = f"width {width} is not divisible by {heads} heads"
        yield Fault(key, text, f"set it to {nearest_divisors(heads, width, parts)}")
    elif heads % parts:
        text = f"{heads} heads are not divisible by {run.parallel.head_parts_text}"
        yield Fault(key, text, f"set it to {nearest_divisors(heads, width, parts)}")
    if side % memory.patch_size == 0:
        count = (side // memory.patch_size) ** 2
        what = f"{count} patches of the encoder"
        yield from check_split(run, count, what=what, changes=("memory.patch_size",))


def _check_transform(grammar: Grammar) -> Faults:
    """Check that an adapter is used for latents whose Gaussians are predicted."""
    transform, reads = grammar.transform, grammar.reads
    if transform is None:
        return
    if grammar.predicts is not None or reads.kind != "latents":
        text = "adapter needs latents that are both read and predicted"
        yield Fault("transform", text, _WITHOUT_TRANSFORM)
        return
    asks, schedule = grammar.asks, grammar.schedule
    in_raster = schedule.kind == "one_by_one" and schedule.order == "raster"
    shifts = asks.kind == "shift" and asks.place == "asked" and in_raster
    shifts = shifts and not schedule.differs_by_image
    masks = asks.kind == "mask" and not schedule.differs_by_image
    if not (grammar.density.has_likelihood and (shifts or masks)):
        text = "adapter needs schedule one_by_one in raster order and asks of kind shift with place"
        text = f"{text} asked, or asks of kind mask without an order, and a density of Gaussians"
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


def _check_dense(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that a head that predicts pixels or objects has one feature for each patch."""
    if run.finetune is None or run.finetune.task == "classes":
        return
    task, remedy = run.finetune.task, "set it to classes"
    if grammar.reads.kind != "patches":
        text = f"{task} reads patches of an image, and {{reads}} is {grammar.reads.kind}"
        yield Fault("finetune.task", text, remedy)
        return
    if grammar.asks.kind == "instruct":
        text = f"{task} needs rows of patches alone, and {{asks}} instruct has rows of places too"
        yield Fault("finetune.task", text, remedy)
    if grammar.schedule.draws_features:
        text = f"{task} needs a feature of each patch, and {{schedule}} hides random patches"
        changes = ("schedule.feature_order",) if grammar.schedule.kind == "groups" else ()
        yield Fault("finetune.task", text, remedy, changes)
    if task == "instances":
        yield from _check_instances(grammar, run)


def _check_instances(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that levels of a pyramid and windows cover the patches of an image."""
    assert run.finetune is not None
    assert isinstance(grammar.reads, Patches)
    side, patch = run.data.image_size, grammar.reads.patch_size
    if patch < 4 or patch & (patch - 1):
        text = f"instances needs patches of 4, 8, 16 or 32 pixels, not {patch}"
        yield Fault("reads.patch_size", text, "use one of them")
    elif side % (4 * patch):
        text = f"must be a multiple of {4 * patch}, for the pyramid of finetune.task instances"
        yield Fault("data.image_size", text, f"use {max(1, round(side / (4 * patch))) * 4 * patch}")
    window = run.finetune.window
    if window == side // patch:
        text = f"{window} covers the image's whole side in patches, so it restricts no block"
        yield Fault("finetune.window", text, f"set it to {nearest_divisors(window, window)}")
    elif window is not None and (side // patch) % window:
        text = f"{window} does not divide the image's {side // patch} patches along a side"
        yield Fault("finetune.window", text, f"set it to {nearest_divisors(window, side // patch)}")
    if grammar.is_modulated or grammar.memory is not None:
        text = "instances does not support blocks with modulation or a memory"
        yield Fault("finetune.task", text, "set it to classes")


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
    share = "least_masking" if grammar.schedule.kind == "rounds" else "mask_ratio"
    changes: tuple[str, ...] = (f"schedule.{share}",) if rows.decoder else ()
    has_count = isinstance(grammar.condition, LearnedTokens) or grammar.places_front
    if has_count:
        changes += ("condition.count",)
    # The decoder has as many rows as its head reads.
    yield from check_split(run, rows.blocks, rows.head, what=what, changes=changes)


def check_split(run: RunConfig, *counts: int, what: str, changes: tuple[str, ...]) -> Faults:
    """Check that the layout divides rows, under sequence and context parallelism.

    Args:
        counts: counts of rows, each of which is split.
        what: description of the rows, with their number, for the message.
        changes: keys on which the counts depend.
    """
    parallel, context = run.parallel, run.parallel.context_parallel_size
    if any(count % context for count in counts):
        text = f"{what} are not divisible by context_parallel_size {context}"
        yield Fault("parallel.context_parallel_size", text, "set it to 1", changes)
    elif any(count % parallel.token_parts for count in counts):
        text = f"{what} are not divisible by {parallel.head_parts_text}"
        yield Fault("parallel.sequence_parallel", text, "set it to false", changes)
