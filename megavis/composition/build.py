"""From the words of a paper to the objects that they name.

The kind of a word is the name, in snake case, of the class that is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megavis.composition import asking, condition, encoded_tokens, tokens
from megavis.composition.encoded_image import EncodedImage
from megavis.composition.parts import Role
from megavis.config.schema import ModelConfig, RunConfig
from megavis.densities.categorical import Categorical, Place
from megavis.densities.decoders import NO_DECODER, DecoderSpec, DecoderWork, PatchHead
from megavis.densities.density import Density
from megavis.densities.diffusion import Diffusion, DiffusionProcess
from megavis.densities.gaussians import CorrelatedGaussian, GaussianMixture
from megavis.densities.squared_error import SquaredError
from megavis.grammar import words
from megavis.grammar.grammar import Grammar
from megavis.model.adapter import Adapter
from megavis.model.core import Core
from megavis.model.embeddings import TokenHead, grid_positions
from megavis.model.encoder import EncoderSizes
from megavis.model.gaussian_mixture import ScaleForm
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
from megavis.schedules.masked import Context, Masked, Rounds
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders, order_of_run
from megavis.schedules.schedule import Schedule
from megavis.schedules.segmented import Groups
from megavis.tokenizers.patches import pixel_range

Key = Callable[[str], str]
"""Maps a key of the grammar to the config's, for messages."""


def build_tokens(word: words.TokenWord, run: RunConfig, key: Key) -> tokens.Tokens:
    """Return tokens; `key` maps their own keys."""
    size, data = run.data.image_size, run.data
    if isinstance(word, words.Colors):
        windows = data.crop == "window"
        return tokens.Colors(
            image_size=size, vocabulary_size=word.vocabulary_size, windows=windows, key=key
        )
    if isinstance(word, words.Ids):
        return encoded_tokens.Ids(
            image_size=size,
            side=word.grid(data)[0],
            vocabulary_size=word.vocabulary_size,
            tokenizer=word.tokenizer,
            key=key,
        )
    if isinstance(word, words.Latents):
        return encoded_tokens.Latents(
            channels=word.channels,
            side=word.grid(data)[0],
            stacked=word.stacked,
            seed=run.seed,
            tokenizer=word.tokenizer,
            beta=word.tokenizer_beta,
            image_size=size,
            key=key,
        )
    if isinstance(word, words.Frames):
        assert data.frames is not None
        return tokens.Frames(*data.frames, normalize=data.normalize_frames)
    assert isinstance(word, words.Patches)
    return tokens.Patches(image_size=size, patch_size=word.patch_size)


def build_schedule(grammar: Grammar, run: RunConfig, grid: tuple[int, int]) -> Schedule:
    """Return the schedule of a grid of tokens."""
    word, asks, seed, count = grammar.schedule, grammar.asks, run.seed, grid[0] * grid[1]
    if isinstance(word, words.Context):
        return Context(
            count,
            mask_ratio=word.mask_ratio,
            placed_ratio=asks.given_ratio if isinstance(asks, words.InContext) else 0.0,
            asks_context=asks.kind != "visible",
            seed=seed,
        )
    if isinstance(word, words.Groups):
        # Without masks neither order nor groups matter.
        masks = run.finetune is None or run.finetune.visibility == "kept"
        return Groups(
            word.length,
            num_tokens=count,
            num_groups=word.num_groups,
            boundaries=word.boundaries,
            shuffled=word.order == "random",
            draws_features=masks and word.feature_order == "drawn",
            seed=seed,
        )
    if isinstance(word, words.OneByOne):
        return OneByOne(_orders(word, grid, seed), prefix=word.prefix)
    raster = Orders(torch.arange(count))
    if isinstance(word, words.Rounds):
        return Rounds(
            raster, least_masking=word.least_masking, loss_average=word.loss_average, seed=seed
        )
    assert isinstance(word, words.Masked)
    return Masked(raster, share=word.mask_ratio, seed=seed)


def _orders(word: words.OneByOne, grid: tuple[int, int], seed: int) -> Orders:
    if word.differs_by_image:
        return Orders(torch.arange(grid[0] * grid[1]), seed=seed)
    return Orders(order_of_run(word.order, *grid, block=word.order_block, seed=seed))


def build_asking(grammar: Grammar) -> asking.Asking:
    """Return the asking kind."""
    word, front, schedule = grammar.asks, grammar.num_front, grammar.schedule
    if isinstance(word, words.Shift):
        has_prefix = isinstance(schedule, words.OneByOne) and schedule.prefix > 0
        return asking.Shift(word.place, by_groups=has_prefix)
    if isinstance(word, words.Query):
        return asking.Query(num_front=front, starts=word.start, queries=word.streams == "two")
    if isinstance(word, words.InContext):
        return asking.InContext(num_front=front)
    if isinstance(word, words.Visible):
        return asking.Visible(num_front=front)
    assert isinstance(word, words.Mask)
    has_learned = grammar.positions in ("learned", "learned_sincos")
    return asking.Mask(
        num_front=front,
        filler=word.filler,
        marks=word.marks,
        places_front=front > 0 and has_learned,
    )


def build_condition(grammar: Grammar, run: RunConfig, key: Key) -> condition.Condition:
    """Return what the model is conditioned on."""
    others, word = _built_condition(grammar, run, key), grammar.memory
    if word is None:
        return others
    sizes = EncoderSizes(
        word.num_layers,
        word.patch_size,
        word.hidden_size,
        word.num_attention_heads,
        word.learning_rate_scale,
        word.activation,
        word.norm_epsilon,
        word.position_std,
    )
    return EncodedImage(run.data.image_size, sizes, others=others, key=_under("memory", key))


def _built_condition(grammar: Grammar, run: RunConfig, key: Key) -> condition.Condition:
    word, key = grammar.condition, _under("condition", key)
    if isinstance(word, words.Labels):
        return condition.Labels(
            word.num_classes,
            role="front" if grammar.num_front else "start",
            dropout=word.dropout,
            seed=run.seed,
            deviation=deviation(grammar.weights.tokens, run.model),
            key=key,
        )
    if isinstance(word, words.PooledFeatures):
        return condition.PooledFeatures(
            run.data.image_size, size=word.feature_size, tokenizer=word.tokenizer, key=key
        )
    return condition.Condition()


def _under(word: str, key: Key) -> Key:
    return lambda name: key(f"{word}.{name}")


def build_density(
    grammar: Grammar,
    run: RunConfig,
    key: Key,
    *,
    core: Core,
    predicts: tokens.Tokens,
    num_skipped: int,
    also_return: str | None,
) -> Density:
    """Return the density.

    Args:
        core: of the blocks below the head.
        predicts: the predicted tokens.
        num_skipped: leading rows that predict nothing.
        also_return: name of a carried tensor that the density scores.
    """
    word = grammar.density

    def token_head(num_outputs: int, fill: Fill = xavier_uniform) -> Callable[[], TokenHead]:
        return partial(
            TokenHead, core, num_outputs, fill, num_skipped=num_skipped, also_return=also_return
        )

    if isinstance(word, words.Place):
        count = predicts.num_tokens
        return Place(count, build_head=token_head(count, normal(0.02)))
    if isinstance(word, words.Categorical):
        assert isinstance(predicts, tokens.Vocabulary)
        fill = normal(word.head_std) if word.head_std else zeros
        size = predicts.vocabulary_size
        return Categorical(core, size, fill=fill, num_skipped=num_skipped)
    assert isinstance(predicts, tokens.Vectors)
    width = predicts.width
    if isinstance(word, words.GaussianMixture | words.CorrelatedGaussian):
        return _build_gaussians(word, width, token_head)
    patch_head = partial(_patch_head, core, num_skipped=num_skipped)
    if isinstance(word, words.Diffusion):
        return _build_diffusion(word, predicts, run.seed, patch_head)
    assert isinstance(word, words.SquaredError)
    head: Callable[[], Head]
    head, work = token_head(width), NO_DECODER
    if word.decoder != "linear":
        spec = DecoderSpec(word.decoder, width, word.decoder_layers, denoises=False)
        head, work = patch_head(spec)
    return SquaredError(
        width,
        normalize=word.normalize,
        build_head=head,
        decoder=work,
        normalize_key=key("density.normalize"),
    )


def _build_gaussians(
    word: words.GaussianMixture | words.CorrelatedGaussian,
    width: int,
    token_head: Callable[[int, Fill], Callable[[], TokenHead]],
) -> Density:
    form, fill = ScaleForm(word.scale_activation, word.scale_floor), normal(word.head_std)
    if isinstance(word, words.CorrelatedGaussian):
        outputs = width**2 + width
        return CorrelatedGaussian(outputs, form, build_head=token_head(outputs, fill))
    count = word.num_components
    outputs = count * (1 + 2 * width)
    head = token_head(outputs, fill)
    return GaussianMixture(outputs, form, num_components=count, build_head=head)


def _build_diffusion(
    word: words.Diffusion,
    predicts: tokens.Vectors,
    seed: int,
    patch_head: Callable[[DecoderSpec], tuple[Callable[[], Head], DecoderWork]],
) -> Diffusion:
    spec = DecoderSpec(
        word.decoder,
        predicts.width,
        word.decoder_layers,
        denoises=True,
        appends_gamma=word.condition_on_gamma,
        channels=predicts.channels,
    )
    head, work = patch_head(spec)
    values = pixel_range() if isinstance(predicts, tokens.Patches) else None
    process = DiffusionProcess.of(word, value_range=values, seed=seed)
    return Diffusion(predicts.width, process, build_head=head, decoder=work)


def _patch_head(
    core: Core, spec: DecoderSpec, *, num_skipped: int
) -> tuple[Callable[[], Head], DecoderWork]:
    return partial(PatchHead, core, spec, num_skipped=num_skipped), spec.work(core)


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
    role: Role, grammar: Grammar, core: Core, reads: tokens.Tokens, *, num_front: int
) -> nn.Module | nn.Parameter:
    """Build a part of the first layer that is not a condition's."""
    weights, width = grammar.weights, core.model.hidden_size
    if role == "transform":
        return _build_adapter(grammar.transform, reads)
    if role == "content":
        if isinstance(reads, tokens.Vectors) and weights.vectors == "lecun":
            return reads.embedding(core, truncated_normal(reads.width**-0.5))
        return reads.embedding(core)
    if role in ("positions", "asked_positions"):
        fill = normal(deviation(weights.positions, core.model))
        return grid_positions(core, grammar.positions, reads.grid, fill=fill)
    assert role != "encoder", "the condition builds its encoder"
    word = weights.positions if role == "front_position" else weights.tokens
    counts: dict[Role, tuple[int, ...]] = {"marks": (2,), "front": (num_front,)}
    return filled(*counts.get(role, ()), width, fill=normal(deviation(word, core.model)))


def _build_adapter(word: words.Adapter | None, reads: tokens.Tokens) -> Adapter:
    assert word is not None
    assert isinstance(reads, tokens.Vectors)
    bottleneck = word.bottleneck or 4 * reads.width
    return Adapter(reads.width, num_blocks=word.blocks, bottleneck=bottleneck)
