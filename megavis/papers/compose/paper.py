"""A free composition of tokens, schedule, asking, density and condition, chosen in a YAML file.

New combinations need no code. The config checks which can be combined (`config.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from megavis.composition.asking import Asking, InContext, Mask, Query, Shift, Visible
from megavis.composition.composition import Composition
from megavis.composition.condition import ClassInFront, Condition, Labels, PooledFeatures
from megavis.composition.encoded_image import EncodedImage
from megavis.composition.encoded_tokens import Latents, TokenIds
from megavis.composition.parts import TRANSFORMED, Role
from megavis.composition.reader import SecondStack
from megavis.composition.tokens import Colors, Frames, Patches, Tokens, Vectors
from megavis.config.section import PositionKind
from megavis.densities.categorical import Categorical, Place
from megavis.densities.decoders import DecoderSpec, PatchHead
from megavis.densities.density import Density
from megavis.densities.diffusion import Diffusion, DiffusionProcess
from megavis.densities.gaussians import GaussianMixture
from megavis.densities.squared_error import SquaredError
from megavis.model.adapter import Adapter
from megavis.model.embeddings import TokenHead
from megavis.model.encoder import EncoderSizes
from megavis.model.gaussian_mixture import ScaleForm
from megavis.model.parameters import Fill, normal
from megavis.papers.compose.config import ComposeConfig
from megavis.papers.compose.sections import (
    AdapterTransform,
    AnyTokens,
    BridgeAsking,
    ClassCondition,
    ContextSchedule,
    DiffusionDensity,
    FeaturesCondition,
    FrameTokens,
    GroupsSchedule,
    IdTokens,
    LatentTokens,
    MemoryCondition,
    MixtureDensity,
    OneByOneSchedule,
    PaletteTokens,
    PlaceDensity,
    QueryAsking,
    RoundsSchedule,
    SelfAsking,
    ShiftAsking,
    SquaredErrorDensity,
)
from megavis.schedules.masked import MaskedShare, RandomMasking, Rounds
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import Schedule
from megavis.schedules.segmented import Grouping
from megavis.tokenizers.patches import pixel_range


class Compose(Composition):
    """A paper composed by its config."""

    config_type = ComposeConfig
    paper: ComposeConfig
    default_positions = "learned"

    @cached_property
    def reads(self) -> Tokens:
        """The input tokens."""
        return self._tokens(self.paper.reads, "objective.reads")

    @cached_property
    def predicts(self) -> Tokens:
        """The predicted tokens."""
        if self.paper.predicts is None:
            return self.reads
        return self._tokens(self.paper.predicts, "objective.predicts")

    def _tokens(self, keys: AnyTokens, section: str) -> Tokens:
        data = self.config.data
        if isinstance(keys, PaletteTokens):
            return self.colours(keys, section=section)
        if isinstance(keys, IdTokens):
            return self.ids(keys, section=section)
        if isinstance(keys, LatentTokens):
            return Latents(
                channels=keys.channels,
                side=keys.grid(data)[0],
                stacked=1,
                seed=self.config.seed,
                tokenizer=keys.tokenizer,
                beta=None,
                image_size=data.image_size,
                section=section,
                shape_keys=("channels", "patch_size"),
            )
        if isinstance(keys, FrameTokens):
            assert data.frames is not None
            return Frames(*data.frames, normalize=data.normalize_frames)
        return self.patches(keys)

    @property
    def position_kind(self) -> PositionKind:
        """The config's, by default learned, or none if positions are predicted."""
        is_self = isinstance(self.paper.asks, SelfAsking)
        return self.config.model.positions or ("none" if is_self else "learned")

    @cached_property
    def schedule(self) -> Schedule:
        """What is known when a token is predicted."""
        keys, asks, seed = self.paper.schedule, self.paper.asks, self.config.seed
        height, width = self.reads.grid
        if isinstance(keys, ContextSchedule):
            return RandomMasking(
                height * width,
                mask_ratio=keys.mask_ratio,
                placed_ratio=asks.given_ratio if isinstance(asks, SelfAsking) else 0.0,
                asks_context=isinstance(asks, SelfAsking),
                seed=seed,
            )
        if isinstance(keys, GroupsSchedule):
            return Grouping(
                keys.length,
                num_tokens=height * width,
                num_groups=keys.num_groups,
                shuffled=True,
                seed=seed,
            )
        if isinstance(keys, OneByOneSchedule):
            orders = Orders.of_kind(keys.order, height, width, block=keys.order_block, seed=seed)
            return OneByOne(orders, prefix=keys.prefix)
        orders = Orders(torch.arange(height * width))
        if isinstance(keys, RoundsSchedule):
            return Rounds(
                orders,
                least_masking=keys.least_masking,
                loss_average=keys.loss_average,
                seed=seed,
            )
        return MaskedShare(orders, share=keys.mask_ratio, seed=seed)

    @cached_property
    def asks(self) -> Asking:
        """Which row predicts a token."""
        keys, schedule = self.paper.asks, self.paper.schedule
        condition = self.paper.condition.kind
        if isinstance(keys, ShiftAsking):
            has_prefix = isinstance(schedule, OneByOneSchedule) and schedule.prefix > 0
            return Shift(keys.place, by_groups=has_prefix)
        if isinstance(keys, QueryAsking):
            in_front = condition in ("class", "features")
            return Query(num_front=int(in_front), starts=condition != "features")
        if isinstance(keys, SelfAsking):
            return InContext(num_front=int(keys.class_token))
        if isinstance(keys, BridgeAsking):
            return Visible(num_front=int(keys.class_token))
        return Mask(filler=keys.filler)

    @cached_property
    def second_stack(self) -> SecondStack | None:
        """The decoder after a bridge."""
        keys, asks = self.paper.asks, self.asks
        if not isinstance(keys, BridgeAsking):
            return None
        assert isinstance(asks, Visible)
        sizes, grid = keys.decoder.model_dump(), self.reads.grid
        return SecondStack(self.core, asks, sizes, grid=grid, positions=self.position_kind)

    @cached_property
    def condition(self) -> Condition:
        """A class, pooled features, an encoded image, or nothing."""
        keys, image_size = self.paper.condition, self.config.data.image_size
        if isinstance(keys, MemoryCondition):
            own = keys.hidden_size, keys.num_attention_heads
            return EncodedImage(image_size, EncoderSizes(keys.num_layers, keys.patch_size, *own))
        if isinstance(keys, FeaturesCondition):
            return PooledFeatures(
                image_size,
                size=keys.feature_size,
                tokenizer=keys.tokenizer,
                size_key="objective.condition.feature_size",
                tokenizer_key="objective.condition.tokenizer",
            )
        if not isinstance(keys, ClassCondition):
            return Condition()
        kind = Labels if isinstance(self.paper.asks, ShiftAsking) else ClassInFront
        return kind(
            keys.num_classes,
            dropout=keys.dropout,
            seed=self.config.seed,
            deviation=0.02,
            classes_key="objective.condition.num_classes",
            dropout_key="objective.condition.dropout",
        )

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Noisy tokens, for diffusion."""
        return ("noisy",) if isinstance(self.paper.density, DiffusionDensity) else ()

    @cached_property
    def density(self) -> Density:
        """How a token is predicted, scored and sampled."""
        keys, predicted = self.paper.density, self.predicts
        if isinstance(predicted, Colors | TokenIds):
            return Categorical(self.core, predicted.vocabulary_size, fill=normal(0.02))
        if isinstance(keys, PlaceDensity):
            count, skipped = predicted.num_tokens, self.asks.num_front
            head = partial(TokenHead, self.core, count, normal(0.02))
            return Place(count, num_skipped=skipped, build_head=head)
        assert isinstance(predicted, Vectors)
        width = predicted.width
        if isinstance(keys, MixtureDensity):
            outputs = keys.num_components * (1 + 2 * width)
            fill = normal(keys.head_std)
            return GaussianMixture(
                outputs,
                ScaleForm(keys.scale_activation, keys.scale_floor),
                num_components=keys.num_components,
                build_head=self._token_head(outputs, fill),
            )
        if isinstance(keys, DiffusionDensity):
            return self._diffusion(keys, predicted)
        assert isinstance(keys, SquaredErrorDensity)
        return SquaredError(
            width,
            normalize=keys.normalize,
            normalize_key="objective.density.normalize",
            build_head=self._token_head(width),
        )

    def _token_head(self, num_outputs: int, fill: Fill | None = None) -> Callable[[], TokenHead]:
        """Return a factory of a linear head; after a bridge it reads the rows of hidden tokens."""
        options: dict[str, Any] = {} if fill is None else {"fill": fill}
        if self.has_transform:
            options["also_return"] = TRANSFORMED
        upper = self.second_stack
        if upper is None:
            return partial(TokenHead, self.core, num_outputs, **options)
        assert isinstance(self.schedule, RandomMasking)
        options["num_skipped"] = self.schedule.draw(torch.zeros(1).long()).num_content
        options["num_skipped"] += self.asks.num_front
        return partial(TokenHead, upper.core, num_outputs, **options)

    def _diffusion(self, keys: DiffusionDensity, predicted: Vectors) -> Diffusion:
        are_pixels, width = isinstance(predicted, Patches), predicted.width
        decoder = DecoderSpec(
            keys.decoder,
            width,
            keys.decoder_layers,
            denoises=True,
            appends_gamma=keys.condition_on_gamma,
            channels=3 if are_pixels else width,
        )
        values = pixel_range() if are_pixels else None
        process = DiffusionProcess.of(keys, value_range=values, seed=self.config.seed)
        head, work = partial(PatchHead, self.core, decoder), decoder.work(self.core)
        return Diffusion(width, process, build_head=head, decoder=work)

    @property
    def has_transform(self) -> bool:
        """True with an adapter."""
        return isinstance(self.paper.transform, AdapterTransform)

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part of the first layer."""
        keys = self.paper.transform
        if role != "transform" or not isinstance(keys, AdapterTransform):
            return super().part(role)
        assert isinstance(self.reads, Latents)
        size = self.reads.width
        return Adapter(size, num_blocks=keys.blocks, bottleneck=keys.bottleneck or 4 * size)
