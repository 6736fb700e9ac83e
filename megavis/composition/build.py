"""From the words of a paper to the objects that they name.

The kind of a word is the name, in snake case, of the class that is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import TYPE_CHECKING

import torch
from torch import nn

from megavis.composition import asking, condition, encoded_tokens, tokens
from megavis.composition.encoded_image import EncodedImage
from megavis.composition.instruct import Instruct
from megavis.composition.parts import Role
from megavis.composition.tokens import Key
from megavis.config.schema import ModelConfig, RunConfig
from megavis.densities.categorical import Categorical, Place
from megavis.densities.density import NO_DECODER, DecoderWork, Density
from megavis.grammar import words
from megavis.grammar.boundaries import context_size
from megavis.grammar.grammar import Grammar
from megavis.model.adapter import Adapter
from megavis.model.core import Core
from megavis.model.embeddings import TokenHead, WholeNorm, grid_positions
from megavis.model.encoder import EncoderSizes
from megavis.model.heads import Head
from megavis.model.parameters import (
    Fill,
    Initialization,
    filled,
    normal,
    truncated_normal,
    vision_transformer,
    xavier_uniform,
    zeros,
)
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.hidden_tokens import HiddenTokens
from megavis.schedules.masked import Context, Masked, Rounds
from megavis.schedules.one_by_one import Annealing, OneByOne
from megavis.schedules.ordered_rounds import OrderedRounds
from megavis.schedules.orders import Orders, order_of_run
from megavis.schedules.schedule import Schedule
from megavis.schedules.segmented import Groups

if TYPE_CHECKING:
    from megavis.densities.decoders import DecoderSpec


@singledispatch
def build_tokens(word: words.TokenWord, run: RunConfig, key: Key) -> tokens.Tokens:
    """Return tokens; `key` maps their own keys."""
    raise TypeError(word)


@build_tokens.register
def _(word: words.Colors, run: RunConfig, key: Key) -> tokens.Tokens:
    return tokens.Colors(
        image_size=run.data.image_size,
        vocabulary_size=word.vocabulary_size,
        windows=run.data.crop == "window",
        key=key,
    )


@build_tokens.register
def _(word: words.Patches, run: RunConfig, key: Key) -> tokens.Tokens:
    return tokens.Patches(
        image_size=run.data.image_size,
        patch_size=word.patch_size,
        embedding_norm=word.embedding_norm,
    )


@build_tokens.register
def _(word: words.Ids, run: RunConfig, key: Key) -> tokens.Tokens:
    return encoded_tokens.Ids(
        image_size=run.data.image_size,
        side=word.grid(run.data)[0],
        vocabulary_size=word.vocabulary_size,
        tokenizer=word.tokenizer,
        key=key,
    )


@build_tokens.register
def _(word: words.Latents, run: RunConfig, key: Key) -> tokens.Tokens:
    return encoded_tokens.Latents(
        channels=word.channels,
        side=word.grid(run.data)[0],
        stacked=word.stacked,
        scale=word.scale,
        seed=run.seed,
        tokenizer=word.tokenizer,
        beta=word.tokenizer_beta,
        image_size=run.data.image_size,
        key=key,
    )


@build_tokens.register
def _(word: words.Frames, run: RunConfig, key: Key) -> tokens.Tokens:
    assert run.data.frames is not None
    return tokens.Frames(*run.data.frames, normalize=run.data.normalize_frames)


Grid = tuple[int, int]


@singledispatch
def build_schedule(
    word: words.ScheduleWord, grammar: Grammar, run: RunConfig, grid: Grid
) -> Schedule:
    """Return the schedule of a grid of tokens, in a grammar."""
    raise TypeError(word)


@build_schedule.register
def _(word: words.OneByOne, grammar: Grammar, run: RunConfig, grid: Grid) -> Schedule:
    shared = torch.arange(grid[0] * grid[1])
    if word.order != "random" or word.drawn == "run":
        shared = order_of_run(word.order, *grid, block=word.order_block, seed=run.seed)
    orders = Orders(shared, seed=run.seed if word.differs_by_image else None)
    annealing = None
    if word.anneal is not None:
        steps = run.training.steps
        start, end = (share * steps for share in word.anneal)
        annealing = Annealing(start, end, num_steps=steps)
    return OneByOne(
        orders,
        prefix=word.prefix,
        first_asked=grammar.asks.first_asked,
        asks_several=grammar.asks.asks_several,
        seed=run.seed,
        annealing=annealing,
    )


@build_schedule.register
def _(word: words.Masked, grammar: Grammar, run: RunConfig, grid: Grid) -> Schedule:
    return Masked(
        grid[0] * grid[1],
        share=word.mask_ratio,
        hidden=_hidden_tokens(word, grid) if word.count == "exact" else None,
        masks_features=word.features == "masked",
        seed=run.seed,
    )


def _hidden_tokens(word: words.Masked | words.Context, grid: Grid) -> HiddenTokens:
    num_tokens = grid[0] * grid[1]
    count = num_tokens - context_size(num_tokens, word.mask_ratio)
    return HiddenTokens(word.shape, grid, count)


@build_schedule.register
def _(word: words.Rounds, grammar: Grammar, run: RunConfig, grid: Grid) -> Schedule:
    count = grid[0] * grid[1]
    most = word.shown(count)[1]
    share = HiddenShare(count, word.least_masking, word.masking_deviation, count - most)
    if word.chosen == "order":
        shown = count if grammar.asks.holds_hidden else most
        return OrderedRounds(share, most_shown=shown, loss_average=word.loss_average, seed=run.seed)
    return Rounds(
        count,
        share=share,
        loss_average=word.loss_average,
        of_ids=grammar.predicted.is_discrete,
        seed=run.seed,
    )


@build_schedule.register
def _(word: words.Groups, grammar: Grammar, run: RunConfig, grid: Grid) -> Schedule:
    # Without masks neither order nor groups matter.
    masks = run.finetune is None or run.finetune.visibility == "kept"
    return Groups(
        word.length,
        num_tokens=grid[0] * grid[1],
        num_groups=word.num_groups,
        boundaries=word.boundaries,
        shuffled=word.order == "random",
        draws_features=masks and word.feature_order == "drawn",
        loss_average=word.loss_average,
        seed=run.seed,
    )


@build_schedule.register
def _(word: words.Context, grammar: Grammar, run: RunConfig, grid: Grid) -> Schedule:
    return Context(
        grid[0] * grid[1],
        mask_ratio=word.mask_ratio,
        hidden=None if word.shape == "tokens" else _hidden_tokens(word, grid),
        placed_ratio=grammar.asks.given_ratio if grammar.asks.kind == "in_context" else 0.0,
        asks_context=grammar.asks.predicts_context,
        seed=run.seed,
    )


@singledispatch
def build_asking(word: words.AskWord, grammar: Grammar) -> asking.Asking:
    """Return the asking kind of a grammar."""
    raise TypeError(word)


@build_asking.register
def _(word: words.Shift, grammar: Grammar) -> asking.Asking:
    schedule = grammar.schedule
    is_drawn = schedule.kind == "one_by_one" and schedule.prefix == "drawn"
    # A prefix of the first row alone is causal.
    by_groups = is_drawn or schedule.num_given > word.first_asked
    return asking.Shift(word.place, starts=word.start, sink=word.sink, by_groups=by_groups)


@build_asking.register
def _(word: words.Query, grammar: Grammar) -> asking.Asking:
    return asking.Query(
        num_front=grammar.num_front,
        starts=word.start,
        queries=word.streams == "two",
        places_front=grammar.places_front,
    )


@build_asking.register
def _(word: words.Instruct, grammar: Grammar) -> asking.Asking:
    return Instruct()


@build_asking.register
def _(word: words.InContext, grammar: Grammar) -> asking.Asking:
    return asking.InContext(num_front=grammar.num_front, places_front=grammar.places_front)


@build_asking.register
def _(word: words.Visible, grammar: Grammar) -> asking.Asking:
    return asking.Visible(
        num_front=grammar.num_front,
        hides=grammar.schedule.kind == "rounds",
        places_front=grammar.places_front,
    )


@build_asking.register
def _(word: words.Mask, grammar: Grammar) -> asking.Asking:
    has_learned = grammar.positions in ("learned", "learned_sincos")
    return asking.Mask(
        num_front=grammar.num_front,
        filler=word.filler,
        marks=word.marks,
        places_front=grammar.places_front or (grammar.num_front > 0 and has_learned),
    )


def build_condition(grammar: Grammar, run: RunConfig, key: Key) -> condition.Condition:
    """Return what the model is conditioned on."""
    own = _build_condition(grammar.condition, grammar, run, under("condition", key))
    word = grammar.memory
    if word is None:
        return own
    sizes, key = EncoderSizes(word), under("memory", key)
    return EncodedImage(run.data.image_size, sizes, others=own, key=key)


@singledispatch
def _build_condition(
    word: words.ConditionWord | None, grammar: Grammar, run: RunConfig, key: Key
) -> condition.Condition:
    # Learned tokens are parts of the first layer alone.
    return condition.Condition()


@_build_condition.register
def _(word: words.Labels, grammar: Grammar, run: RunConfig, key: Key) -> condition.Condition:
    return condition.Labels(
        word.num_classes,
        role="front" if grammar.num_front else "start",
        dropout=word.dropout,
        seed=run.seed,
        deviation=deviation(grammar.weights.tokens, run.model),
        key=key,
    )


@_build_condition.register
def _(
    word: words.PooledFeatures, grammar: Grammar, run: RunConfig, key: Key
) -> condition.Condition:
    size, folder = word.feature_size, word.tokenizer
    return condition.PooledFeatures(run.data.image_size, size=size, tokenizer=folder, key=key)


def under(word: str, key: Key) -> Key:
    """Return `key` for the keys below a word: `name` becomes `key("word.name")`."""
    return lambda name: key(f"{word}.{name}")


@dataclass(frozen=True)
class HeadPlan:
    """What a density's head is built from.

    Attributes:
        core: core of the blocks below it.
        predicts: the predicted tokens.
        num_skipped: leading rows that predict nothing.
        also_return: name of a carried tensor that the density scores.
        seed: the run's seed.
    """

    core: Core
    predicts: tokens.Tokens
    num_skipped: int
    also_return: str | None
    seed: int

    @property
    def width(self) -> int:
        """Values of a token."""
        return self.predicts.width

    def linear(self, num_outputs: int, fill: Fill = xavier_uniform) -> Callable[[], Head]:
        """Return a factory of the norm and a linear map."""
        return partial(
            TokenHead,
            self.core,
            num_outputs,
            fill,
            num_skipped=self.num_skipped,
            also_return=self.also_return,
        )

    def decoder(self, spec: DecoderSpec) -> tuple[Callable[[], Head], DecoderWork]:
        """Return a factory of the norm and a decoder, and the decoder's work."""
        from megavis.densities.decoders import PatchHead

        head = partial(PatchHead, self.core, spec, num_skipped=self.num_skipped)
        return head, spec.work(self.core)


@singledispatch
def build_density(word: words.DensityWord, head: HeadPlan) -> Density:
    """Return the density; most are imported only when a word names them."""
    raise TypeError(word)


@build_density.register
def _(word: words.Categorical, head: HeadPlan) -> Density:
    assert isinstance(head.predicts, tokens.Vocabulary)
    fill = normal(word.head_std) if word.head_std else zeros
    size = head.predicts.vocabulary_size
    return Categorical(head.core, size, fill=fill, has_bias=word.bias, num_skipped=head.num_skipped)


@build_density.register
def _(word: words.Place, head: HeadPlan) -> Density:
    count = head.predicts.num_tokens
    return Place(count, build_head=head.linear(count, normal(0.02)))


@build_density.register
def _(word: words.SquaredError, head: HeadPlan) -> Density:
    from megavis.densities.squared_error import SquaredError

    factory, work = head.linear(head.width), NO_DECODER
    if word.decoder != "linear":
        from megavis.densities.decoders import DecoderSpec

        spec = DecoderSpec(
            word.decoder,
            head.width,
            word.decoder_layers,
            denoises=False,
            num_outputs=head.width,
            hidden_size=word.decoder_width,
            grid=head.predicts.grid if word.decoder_positions else None,
        )
        factory, work = head.decoder(spec)
    return SquaredError(
        head.width,
        norm=word.norm,
        normalize=word.normalize,
        build_head=factory,
        decoder=work,
    )


@build_density.register
def _(word: words.GaussianMixture, head: HeadPlan) -> Density:
    from megavis.densities.gaussians import GaussianMixture
    from megavis.model.gaussian_mixture import ScaleForm

    form, count = ScaleForm(word.scale_activation, word.scale_floor), word.num_components
    outputs = count * (1 + 2 * head.width)
    factory = head.linear(outputs, normal(word.head_std))
    return GaussianMixture(outputs, form, num_components=count, build_head=factory)


@build_density.register
def _(word: words.CorrelatedGaussian, head: HeadPlan) -> Density:
    from megavis.densities.gaussians import CorrelatedGaussian
    from megavis.model.gaussian_mixture import ScaleForm

    outputs = head.width**2 + head.width
    form = ScaleForm(word.scale_activation, word.scale_floor)
    return CorrelatedGaussian(outputs, form, build_head=head.linear(outputs, normal(word.head_std)))


@build_density.register
def _(word: words.Diffusion, head: HeadPlan) -> Density:
    from megavis.densities.decoders import DecoderSpec
    from megavis.densities.diffusion import Diffusion

    assert isinstance(head.predicts, tokens.Vectors)
    learns_positions = word.decoder_positions == "learned"
    spec = DecoderSpec(
        word.decoder,
        head.width,
        word.decoder_layers,
        denoises=True,
        appends_gamma=word.condition_on_gamma,
        channels=head.predicts.channels,
        hidden_size=word.decoder_width,
        grid=head.predicts.grid if learns_positions else None,
        learns_positions=learns_positions,
        num_outputs=head.width * (1 + word.learns_variance),
        keys=word,
        num_noises=word.noises_per_token,
    )
    factory, work = head.decoder(spec)
    return Diffusion(
        word,
        width=head.width,
        value_range=head.predicts.value_range,
        seed=head.seed,
        build_head=factory,
        decoder=work,
    )


def build_initialization(word: words.InitialWeights, model: ModelConfig) -> Initialization:
    """Return the initialization of the blocks' matrices."""
    if word.blocks == "xavier":
        return vision_transformer()
    if word.blocks == "gpt":
        width, depth = model.hidden_size, model.num_layers
        projection, output = normal(width**-0.5), normal((width * depth) ** -0.5)
        return Initialization(projection, projection, output, normal(0.02), normal(0.02))
    if word.blocks == "lecun":
        lecun = truncated_normal(model.hidden_size**-0.5)
        return Initialization(lecun, lecun, lecun, xavier_uniform, xavier_uniform)
    fill = normal(word.blocks)
    return Initialization(fill, fill, fill, fill, fill)


def deviation(word: words.Deviation, model: ModelConfig) -> float:
    """Return a standard deviation."""
    return model.hidden_size**-0.5 if word == "width" else word


def build_part(
    role: Role, grammar: Grammar, core: Core, reads: tokens.Tokens, counts: Mapping[Role, int]
) -> nn.Module | nn.Parameter:
    """Build a part of the first layer that is not a condition's.

    `counts`: numbers of vectors of parts that have several, by role.
    """
    weights, width = grammar.weights, core.model.hidden_size
    if role == "row_norm":
        return WholeNorm(core)
    if role == "transform":
        word = grammar.transform
        assert word is not None
        bottleneck = word.bottleneck or 4 * reads.width
        return Adapter(reads.width, num_blocks=word.blocks, bottleneck=bottleneck)
    if role == "content":
        if isinstance(reads, tokens.Vectors) and weights.vectors == "lecun":
            return reads.embedding(core, truncated_normal(reads.width**-0.5))
        return reads.embedding(core)
    if role in ("positions", "asked_positions"):
        fill = normal(deviation(weights.positions, core.model))
        kind, asks = grammar.positions, grammar.asks
        zeroes = isinstance(asks, words.Shift | words.Instruct) and asks.zero_start
        return grid_positions(core, kind, reads.grid, fill=fill, zeroes_start=zeroes)
    assert role != "encoder", "the condition builds its encoder"
    spread = weights.positions if role in ("front_position", "row_vectors") else weights.tokens
    shapes: dict[Role, tuple[int, ...]] = {"marks": (2,)}
    shapes |= {several: (count,) for several, count in counts.items()}
    return filled(*shapes.get(role, ()), width, fill=normal(deviation(spread, core.model)))
