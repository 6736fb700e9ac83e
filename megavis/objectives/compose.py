"""Any composition of tokens, schedule, asking, density and condition, chosen in a YAML file.

A combination that nobody has published needs no code. What goes together is checked by its config
(`compose_config.py`).

Legend: b images, n tokens, d numbers of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial

import torch

from megavis.composition.asking import Asking, Mask, Query, Shift
from megavis.composition.codebook import Ids
from megavis.composition.condition import Condition, Labels
from megavis.composition.latents import Latents
from megavis.composition.reader import Role
from megavis.composition.tokens import Colours, Patches, Tokens
from megavis.densities.base import Density
from megavis.densities.categorical import Categorical
from megavis.densities.decoders import Decoder, PatchHead
from megavis.densities.diffusion import Diffusion, Process
from megavis.densities.gaussians import GaussianMixture
from megavis.densities.squared_error import SquaredError
from megavis.model.init import normal
from megavis.model.mixture import ScaleForm
from megavis.model.patches import TokenHead
from megavis.objectives.compose_config import (
    AnyTokens,
    ClassCondition,
    ComposeConfig,
    DiffusionDensity,
    GroupsSchedule,
    IdTokens,
    LatentTokens,
    MaskAsking,
    MixtureDensity,
    OneByOneSchedule,
    PaletteTokens,
    QueryAsking,
    RoundsSchedule,
    ShiftAsking,
    SquaredErrorDensity,
)
from megavis.objectives.composition import Composition
from megavis.schedules.base import Schedule
from megavis.schedules.masked import MaskedShare, Rounds
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.schedules.segmented import Grouping
from megavis.tokenizers.patches import pixel_range


class ClassInFront(Labels):
    """The class, as a row in front of all others."""

    roles: tuple[Role, ...] = ("front",)


class Compose(Composition):
    """A paper that its config composes."""

    config_type = ComposeConfig
    paper: ComposeConfig
    default_positions = "learned"

    @cached_property
    def reads(self) -> Tokens:
        """What goes in."""
        return self._tokens(self.paper.reads)

    @cached_property
    def predicts(self) -> Tokens:
        """What comes out."""
        return self.reads if self.paper.predicts is None else self._tokens(self.paper.predicts)

    def _tokens(self, keys: AnyTokens) -> Tokens:
        data, size = self.config.data, self.config.data.image_size
        if isinstance(keys, PaletteTokens):
            windows = data.crop == "window"
            return Colours(image_size=size, vocabulary_size=keys.vocabulary_size, windows=windows)
        if isinstance(keys, IdTokens):
            return Ids(
                image_size=size,
                side=keys.side(size),
                vocabulary_size=keys.vocabulary_size,
                tokenizer=keys.tokenizer,
            )
        if isinstance(keys, LatentTokens):
            return Latents(
                channels=keys.channels,
                side=keys.side(size),
                stacked=1,
                seed=self.config.seed,
                tokenizer=keys.tokenizer,
                beta=None,
                image_size=size,
            )
        return Patches(image_size=size, patch_size=keys.patch_size)

    @cached_property
    def schedule(self) -> Schedule:
        """What is known when."""
        keys, side, seed = self.paper.schedule, self.reads.grid[0], self.config.seed
        if isinstance(keys, GroupsSchedule):
            return Grouping(
                keys.length,
                num_tokens=side**2,
                num_groups=keys.num_groups,
                shuffled=True,
                seed=seed,
            )
        if isinstance(keys, OneByOneSchedule):
            orders = Orders.of_kind(keys.order, side, block=keys.order_block, seed=seed)
            return OneByOne(orders, prefix=keys.prefix)
        orders = Orders(torch.arange(side**2))
        if isinstance(keys, RoundsSchedule):
            return Rounds(orders, least_masking=keys.least_masking, seed=seed)
        return MaskedShare(orders, share=keys.mask_ratio, seed=seed)

    @cached_property
    def asks(self) -> Asking:
        """How a token asks."""
        keys, schedule = self.paper.asks, self.paper.schedule
        has_class = isinstance(self.paper.condition, ClassCondition)
        if isinstance(keys, ShiftAsking):
            has_prefix = isinstance(schedule, OneByOneSchedule) and schedule.prefix > 0
            return Shift(keys.place, by_groups=has_prefix)
        if isinstance(keys, QueryAsking):
            return Query(num_front=int(has_class), starts=True)
        return Mask()

    @cached_property
    def condition(self) -> Condition:
        """The class, or nothing: in place of a start token, or in front of all rows."""
        keys = self.paper.condition
        if not isinstance(keys, ClassCondition):
            return Condition()
        kind = Labels if isinstance(self.paper.asks, ShiftAsking) else ClassInFront
        return kind(keys.num_classes, dropout=keys.dropout, seed=self.config.seed, deviation=0.02)

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Noisy tokens, for a density that takes noise away."""
        return ("noisy",) if isinstance(self.paper.density, DiffusionDensity) else ()

    @cached_property
    def density(self) -> Density:
        """How a token is predicted, scored and drawn."""
        keys, predicted = self.paper.density, self.predicts
        if isinstance(predicted, Colours | Ids):
            return Categorical(self.core, predicted.vocabulary_size, fill=normal(0.02))
        assert isinstance(predicted, Patches | Latents)
        width = predicted.width
        if isinstance(keys, MixtureDensity):
            outputs = keys.num_components * (1 + 2 * width)
            fill = normal(keys.head_std)
            return GaussianMixture(
                outputs,
                ScaleForm(keys.scale_activation, keys.scale_floor),
                num_components=keys.num_components,
                build_head=lambda: TokenHead(self.core, outputs, fill),
            )
        if isinstance(keys, DiffusionDensity):
            return self._diffusion(keys, predicted)
        assert isinstance(keys, SquaredErrorDensity)
        return SquaredError(
            width,
            normalize=keys.normalize,
            build_head=lambda: TokenHead(self.core, width),
        )

    def _diffusion(self, keys: DiffusionDensity, predicted: Patches | Latents) -> Diffusion:
        are_pixels, width = isinstance(predicted, Patches), predicted.width
        decoder = Decoder(
            keys.decoder,
            width,
            keys.decoder_layers,
            denoises=True,
            tells_gamma=keys.condition_on_gamma,
            channels=3 if are_pixels else width,
        )
        process = Process(
            beta=(keys.noise_a, keys.noise_b),
            predicts=keys.predicts,
            value_range=pixel_range() if are_pixels else None,
            sampling_steps=keys.sampling_steps,
            temperature=keys.sampling_temperature,
            seed=self.config.seed,
        )
        head, work = partial(PatchHead, self.core, decoder), decoder.flops(self.config.model)
        return Diffusion(width, process, build_head=head, decoder_flops=work)

    @property
    def part_names(self) -> Mapping[Role, str]:
        """What parts are called, by their roles."""
        asks = self.paper.asks
        names: dict[Role, str] = {
            "content": "content",
            "positions": "places",
            "asked_positions": "asked_places",
            "query": "query_vector",
        }
        if isinstance(asks, MaskAsking) and asks.filler == "vector":
            names["mask"] = "filler"
        names |= dict.fromkeys(self.condition.roles, "labels")
        return {**names, **({} if "start" in names else {"start": "start_token"})}
