"""Which tokens fit each other, and the samples of the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from megavis.config.schema import RunConfig
from megavis.grammar.faults import Fault, Faults, nearest_divisors
from megavis.grammar.grammar import Grammar
from megavis.grammar.words import Colors, Ids, Latents, SquareTokens, TokenWord

_NO_OTHER = "{predicts} to null"
_ONE_KIND = f"set {_NO_OTHER}"


def check_token_kinds(grammar: Grammar, run: RunConfig) -> Faults:
    """Check that samples have the tokens that are read, and make those that are predicted."""
    reads, predicts = grammar.reads, grammar.predicts
    key, is_recorded = "reads.kind", run.data.frames is not None
    if reads.kind == "frames" and not is_recorded:
        text = "frames does not fit images"
        yield Fault(key, text, "give data.frames in place of data.image_size, or set it to patches")
    if reads.kind != "frames" and is_recorded:
        text = f"{reads.kind} does not fit recordings, which data.frames describes"
        remedy = "set it to frames"
        remedy += "" if predicts is None else f" and {_NO_OTHER}"
        remedy += "" if grammar.memory is None else " and {memory} to null"
        if grammar.density.kind == "categorical":
            remedy += " and {density.kind} to squared_error"
        yield Fault(key, text, remedy)
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
    if grammar.asks.kind == "in_context":
        yield Fault(key, "is not used with asks in_context, which predicts places", _ONE_KIND)


def check_tokens(grammar: Grammar, run: RunConfig) -> Faults:
    """Check the sizes of the tokens, and that two kinds are made from the same images."""
    reads, predicts = grammar.reads, grammar.predicts
    own = [*_check_size(reads, "reads", run)]
    if predicts is None:
        yield from own
        return
    sizes = [*_check_size(predicts, "predicts", run)]
    yield from own if sizes else _as_many(own, predicts, run)
    for name, tokens in (("reads", reads), ("predicts", predicts)):
        if tokens.lacks_tokenizer:
            text = "must name the run folder of the tokenizer that encodes images"
            yield Fault(f"{name}.tokenizer", text, f"or {_ONE_KIND}")
    yield from sizes if own else _as_many(sizes, reads, run)
    first, other = reads.grid(run.data), predicts.grid(run.data)
    if not sizes and not own and first != other:
        text = "has {} × {} tokens per image, but {{reads}} has {} × {}".format(*other, *first)
        remedy = f"set {{predicts.patch_size}} to {run.data.image_size // first[0]}"
        for name, grid in (("reads", first), ("predicts", other)):
            if grid[0] != grid[1]:  # Some are stacked.
                remedy = f"set {{{name}.stacked}} to 1"
        yield Fault("predicts", text, remedy)


def _as_many(faults: Sequence[Fault], other: TokenWord, run: RunConfig) -> Faults:
    """Yield faults, with a patch size that makes as many tokens as another kind has."""
    rows, columns = other.grid(run.data)
    for fault in faults:
        fits = fault.key.endswith(".patch_size") and rows == columns
        remedy = f"set it to {run.data.image_size // rows}" if fits else fault.remedy
        yield Fault(fault.key, fault.text, remedy, fault.changes)


@singledispatch
def _check_size(tokens: TokenWord, name: str, run: RunConfig) -> Faults:
    """Check that tokens tile the image, and that the tensor group divides a vocabulary."""
    yield from ()


@_check_size.register
def _(tokens: SquareTokens, name: str, run: RunConfig) -> Faults:
    side = run.data.image_size
    if side % tokens.patch_size:
        text = f"{tokens.patch_size} does not divide data.image_size {side}"
        sizes = nearest_divisors(tokens.patch_size, side)
        yield Fault(f"{name}.patch_size", text, f"set it to {sizes}")


@_check_size.register
def _(tokens: Colors, name: str, run: RunConfig) -> Faults:
    # A palette may have fewer colours than there are logits.
    size, tensor = tokens.vocabulary_size, run.parallel.tensor_model_parallel_size
    yield from _check_vocabulary(tokens, name, run, f"set it to {size + -size % tensor}")


@_check_size.register
def _(tokens: Ids, name: str, run: RunConfig) -> Faults:
    yield from _check_size.dispatch(SquareTokens)(tokens, name, run)
    remedy = "set parallel.tensor_model_parallel_size to 1"
    if run.parallel.sequence_parallel:
        remedy += " and parallel.sequence_parallel to false"
    yield from _check_vocabulary(tokens, name, run, remedy)


def _check_vocabulary(tokens: Colors | Ids, name: str, run: RunConfig, remedy: str) -> Faults:
    size, tensor = tokens.vocabulary_size, run.parallel.tensor_model_parallel_size
    if size % tensor:
        text = f"{size} is not divisible by tensor_model_parallel_size {tensor}"
        yield Fault(f"{name}.vocabulary_size", text, remedy)


@_check_size.register
def _(tokens: Latents, name: str, run: RunConfig) -> Faults:
    faults = [*_check_size.dispatch(SquareTokens)(tokens, name, run)]
    yield from faults
    side = run.data.image_size // tokens.patch_size
    if not faults and side % tokens.stacked:
        text = f"{tokens.stacked} does not divide the {side} latents of a row"
        sizes = nearest_divisors(tokens.stacked, side)
        yield Fault(f"{name}.stacked", text, f"set it to {sizes}")
    if tokens.tokenizer_beta is not None and tokens.lacks_tokenizer:
        text = f"needs {{{name}.tokenizer}}, the run of that VAE"
        yield Fault(f"{name}.tokenizer_beta", text, "name it, or set this to null")
