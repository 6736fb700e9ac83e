"""Config keys of free compositions of tokens, schedule, asking, density and condition.

Each choice is a section whose `kind` determines its other keys (`sections.py`). Which choices can
be combined is checked here, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import (
    check_adapter,
    check_encoder,
    check_hiding,
    check_placed,
    check_tokens,
)
from megavis.config.schema import ConfigIssue, ObjectiveConfig, RunConfig
from megavis.papers.compose.sections import (
    AdapterTransform,
    AnyAsking,
    AnyCondition,
    AnyDensity,
    AnySchedule,
    AnyTokens,
    AnyTransform,
    BridgeAsking,
    CategoricalDensity,
    ClassCondition,
    ContextSchedule,
    FrameTokens,
    GroupsSchedule,
    IdTokens,
    LatentTokens,
    MemoryCondition,
    NoCondition,
    NoTransform,
    OneByOneSchedule,
    PaletteTokens,
    PatchTokens,
    PlaceDensity,
    QueryAsking,
    SelfAsking,
    ShiftAsking,
)
from megavis.schedules.boundaries import boundary_range, max_groups


class ComposeConfig(ObjectiveConfig):
    """Config keys of a composition."""

    takes_frames: ClassVar[bool] = True

    name: Literal["compose"] = "compose"
    reads: Annotated[AnyTokens, Field(discriminator="kind")]
    """Input tokens."""
    predicts: Annotated[AnyTokens | None, Field(discriminator="kind")] = None
    """Predicted tokens; defaults to the input tokens."""
    schedule: Annotated[AnySchedule, Field(discriminator="kind")]
    """What is known when a token is predicted."""
    asks: Annotated[AnyAsking, Field(discriminator="kind")]
    """Which row predicts a token."""
    density: Annotated[AnyDensity, Field(discriminator="kind")]
    """How a token is predicted, scored and sampled."""
    condition: Annotated[AnyCondition, Field(discriminator="kind")] = NoCondition(kind="none")
    """What the model is conditioned on."""
    transform: Annotated[AnyTransform, Field(discriminator="kind")] = NoTransform(kind="none")
    """Learned transform of latents before they are read and predicted."""

    @property
    def predicted(self) -> AnyTokens:
        """Predicted tokens."""
        return self.predicts or self.reads

    @property
    def no_images(self) -> str | None:
        """Why models of this config cannot generate images; None if they can."""
        if self.predicts is not None:
            return (
                "a model with objective.predicts cannot continue from its own samples: it reads"
                f" {self.reads.kind}"
            )
        if self.schedule.kind in ("masked", "context"):
            return (
                f"objective.schedule {self.schedule.kind} has no order of generation; train with"
                " rounds to generate"
            )
        if self.condition.kind == "features":
            return (
                "a model with objective.condition of kind features is conditioned on the whole"
                " image; train without it to generate"
            )
        if self.reads.kind == "frames":
            return "frames of a spectrogram cannot be shown as images"
        return None

    @property
    def class_token(self) -> bool:
        """True if a learned token comes first."""
        return isinstance(self.asks, SelfAsking | BridgeAsking) and self.asks.class_token

    @property
    def missing_null_label(self) -> str | None:
        """Key of the label dropout if the model has classes but no null label, else None."""
        has_none = isinstance(self.condition, ClassCondition) and not self.condition.dropout
        return "objective.condition.dropout" if has_none else None

    @property
    def num_further_blocks(self) -> int:
        """Blocks of the encoder of a memory, and of the decoder behind a bridge."""
        encoder = self.condition.num_layers if isinstance(self.condition, MemoryCondition) else 0
        decoder = self.asks.decoder.num_layers if isinstance(self.asks, BridgeAsking) else 0
        return encoder + decoder

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Yield a message for each invalid combination."""
        sizes = [*self._check_sizes(config)]
        yield from sizes
        yield from self._check_asking(config)
        yield from self._check_density()
        yield from self._check_features()
        if isinstance(self.condition, MemoryCondition):
            yield from self._check_memory(self.condition, config)
        if isinstance(self.transform, AdapterTransform):
            yield from self._check_transform(self.transform)
        if not sizes:
            yield from self._check_split(config)

    def _check_sizes(self, config: RunConfig) -> Iterator[ConfigIssue]:
        size, grids = config.data.image_size, []
        if (self.reads.kind == "frames") != (config.data.frames is not None):
            text = f"{self.reads.kind} does not fit the data"
            yield "objective.reads.kind", f"{text}: set both frames and data.frames, or neither"
        tensor = config.parallel.tensor_model_parallel_size
        for key, tokens in (("reads", self.reads), ("predicts", self.predicts)):
            if tokens is None:
                continue
            if isinstance(tokens, FrameTokens):
                grids.append(tokens.grid(config.data))
                continue
            if not isinstance(tokens, PaletteTokens) and size % tokens.patch_size:
                text = f"{tokens.patch_size} does not divide data.image_size {size}"
                yield f"objective.{key}.patch_size", text
            if isinstance(tokens, PaletteTokens | IdTokens) and tokens.vocabulary_size % tensor:
                text = f"{tokens.vocabulary_size} is not divisible by tensor_model_parallel_size"
                yield f"objective.{key}.vocabulary_size", f"{text} {tensor}"
            grids.append(tokens.grid(config.data))
        if len(set(grids)) > 1 and "frames" not in (self.reads.kind, self.predicted.kind):
            first, other = (f"{rows} × {columns}" for rows, columns in grids)
            text = f"has {other} tokens per image, but objective.reads has {first}"
            yield "objective.predicts", text
        yield from self._check_schedule(*grids[0])

    def _check_schedule(self, rows: int, columns: int) -> Iterator[ConfigIssue]:
        schedule, count = self.schedule, rows * columns
        if isinstance(schedule, GroupsSchedule):
            most = max_groups(schedule.length, count)
            if schedule.num_groups > most:
                text = f"{schedule.num_groups} groups cannot be cut from {count} tokens"
                yield "objective.schedule.num_groups", f"{text}; use at most {most}"
        if not isinstance(schedule, OneByOneSchedule):
            return
        if rows != columns and schedule.order not in ("raster", "random"):
            text = f"{schedule.order} needs a square grid, and frames are one row"
            yield "objective.schedule.order", f"{text}; use raster or random"
        elif schedule.order in ("nested_raster", "round_robin") and rows % schedule.order_block:
            text = f"{schedule.order_block} does not divide a grid of {rows} × {columns} tokens"
            yield "objective.schedule.order_block", text
        if schedule.prefix >= count:
            text = f"{schedule.prefix} leaves nothing to predict of {count} tokens"
            yield "objective.schedule.prefix", text

    def _check_asking(self, config: RunConfig) -> Iterator[ConfigIssue]:
        schedule, asks = self.schedule, self.asks
        fitting = {
            "shift": ("one_by_one",),
            "mask": ("masked", "rounds"),
            "query": ("one_by_one", "groups"),
            "self": ("context",),
            "bridge": ("context",),
        }[asks.kind]
        if schedule.kind not in fitting:
            yield (
                "objective.asks.kind",
                f"{asks.kind} needs schedule {' or '.join(fitting)}, not {schedule.kind}",
            )
            return
        positions = config.model.positions or "learned"
        if isinstance(schedule, OneByOneSchedule):
            yield from self._check_places(schedule, positions)
        if self.condition.kind == "class" and asks.kind not in ("shift", "query"):
            text = "class takes the place of a first token, or precedes queries; asks is"
            yield "objective.condition.kind", f"{text} {asks.kind}"
        if isinstance(schedule, ContextSchedule):
            yield from self._check_context(config, schedule)
        if asks.kind not in ("shift", "self") and positions == "none":
            text = f"none makes all tokens that {asks.kind} asks for indistinguishable"
            yield "model.positions", f"{text}; use another kind"

    def _check_context(self, config: RunConfig, schedule: ContextSchedule) -> Iterator[ConfigIssue]:
        asks, ratio_key = self.asks, "objective.schedule.mask_ratio"
        if isinstance(asks, SelfAsking):
            yield from check_placed(
                config,
                mask_ratio=schedule.mask_ratio,
                given_ratio=asks.given_ratio,
                ratio_key=ratio_key,
                given_key="objective.asks.given_ratio",
            )
        if isinstance(asks, BridgeAsking):
            rows, columns = self.reads.grid(config.data)
            yield from check_hiding(
                config,
                rows * columns,
                schedule.mask_ratio,
                class_token=asks.class_token,
                ratio_key=ratio_key,
                class_key="objective.asks.class_token",
            )
            yield from asks.decoder.check(config, "objective.asks.decoder")

    def _check_places(self, schedule: OneByOneSchedule, positions: str) -> Iterator[ConfigIssue]:
        asks = self.asks
        place = asks.place if isinstance(asks, ShiftAsking) else ""
        if place in ("asked", "content") and schedule.order == "random":
            yield (
                "objective.asks.place",
                f"{place} does not encode the position of the"
                f" {'held' if place == 'asked' else 'next'} token, which differs by image in order"
                " random; use both, or kind query",
            )
        if place == "both" and positions not in ("learned", "sincos", "learned_sincos"):
            text = f"{positions} cannot add two places to a row; use learned or sincos"
            yield "model.positions", text
        if schedule.prefix and place != "content":
            text = "a prefix needs asks of kind shift with place content"
            yield "objective.schedule.prefix", text

    def _check_density(self) -> Iterator[ConfigIssue]:
        predicted, density, asks = self.predicted, self.density, self.asks
        if isinstance(density, PlaceDensity) or isinstance(asks, SelfAsking):
            yield from self._check_naming()
            return
        if isinstance(asks, BridgeAsking) and density.kind not in ("squared_error", "mixture"):
            text = f"{density.kind} is not supported with a bridge; use squared_error or mixture"
            yield "objective.density.kind", text
        are_ids = isinstance(predicted, PaletteTokens | IdTokens)
        if are_ids != isinstance(density, CategoricalDensity):
            fitting = "categorical" if are_ids else "squared_error, mixture or diffusion"
            yield (
                "objective.density.kind",
                f"{density.kind} cannot predict {predicted.kind}; use {fitting}",
            )
        if isinstance(predicted, PaletteTokens) and predicted is not self.reads:
            yield "objective.predicts.kind", "palette ids can be predicted only from palette ids"
        if "frames" in (predicted.kind, self.reads.kind) and predicted is not self.reads:
            yield "objective.predicts.kind", "frames can be predicted only from frames"
        if isinstance(self.predicts, IdTokens) and self.predicts.tokenizer is None:
            text = "must name the run folder of the tokenizer that encodes images"
            yield "objective.predicts.tokenizer", text
        if isinstance(self.reads, PaletteTokens) and predicted is not self.reads:
            yield "objective.reads.kind", "palette shards contain no images to make other tokens of"

    def _check_features(self) -> Iterator[ConfigIssue]:
        """Check the tokens and asking of a model conditioned on features."""
        if self.condition.kind != "features":
            return
        if self.asks.kind != "query":
            text = f"features need asks of kind query, not {self.asks.kind}"
            yield "objective.condition.kind", text
        if self.reads.kind != "patches":
            text = f"features are computed from images, which {self.reads.kind} shards lack; read"
            yield "objective.reads.kind", f"{text} patches"

    def _check_memory(self, memory: MemoryCondition, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check the tokens, asking and sizes of a model with an encoder."""
        if self.reads.kind in ("palette", "frames"):
            text = f"an encoder reads images, which {self.reads.kind} shards lack"
            yield "objective.reads.kind", f"{text}; read patches, ids or latents"
        yield from check_encoder(
            config,
            patch_size=memory.patch_size,
            hidden_size=memory.hidden_size,
            num_heads=memory.num_attention_heads,
            key="objective.condition.{}".format,
        )
        if self.asks.kind == "bridge":
            text = "memory is not available to the blocks above a bridge, which predict; use asks"
            yield "objective.condition.kind", f"{text} of kind shift, mask or query"
        if self.asks.kind == "self":
            text = "memory would reveal the position of every token; asks is self"
            yield "objective.condition.kind", f"{text}, so leave it out"

    def _check_transform(self, transform: AdapterTransform) -> Iterator[ConfigIssue]:
        """Check that an adapter is used for next-token prediction of latents."""
        key, schedule, asks = "objective.transform.kind", self.schedule, self.asks
        if not isinstance(self.reads, LatentTokens) or self.predicts is not None:
            yield key, "adapter needs latents that are both read and predicted"
            return
        in_raster = isinstance(schedule, OneByOneSchedule) and schedule.order == "raster"
        shifts = isinstance(asks, ShiftAsking) and asks.place == "asked"
        if not (in_raster and shifts and self.density.kind == "mixture"):
            text = "adapter needs schedule one_by_one in raster order, asks of kind shift with"
            yield key, f"{text} place asked, and density mixture"
        yield from check_adapter(
            self.reads.channels,
            transform.bottleneck,
            blocks_key="objective.transform.blocks",
            bottleneck_key="objective.transform.bottleneck",
        )

    def _check_naming(self) -> Iterator[ConfigIssue]:
        """Check that density `place` and asking `self` are used together, on suitable tokens."""
        if (self.density.kind, self.asks.kind) != ("place", "self"):
            text = f"{self.density.kind} cannot be combined with asks {self.asks.kind}"
            yield "objective.density.kind", f"{text}; use place with asks self"
        if self.predicts is not None:
            yield "objective.predicts.kind", "is not used with density place; leave it out"
        if not isinstance(self.reads, PatchTokens | FrameTokens):
            text = f"positions of {self.reads.kind} cannot be predicted; use patches or frames"
            yield "objective.reads.kind", text

    def _check_split(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check what splits sequences: the counts of all rows, and of those of the head."""
        if isinstance(self.asks, BridgeAsking):  # checked in `check_hiding`
            return
        height, width = self.reads.grid(config.data)
        rows, read = self._num_rows(height * width, config.classifies_only)
        queries = f", {read} of them queries," if read < rows else ""
        yield from check_tokens(config, rows, read, what=f"{rows} rows{queries}")

    def _num_rows(self, count: int, are_features: bool) -> tuple[int, int]:
        """Return the rows of `count` tokens in the blocks, and how many of them the head reads."""
        asks, schedule = self.asks, self.schedule
        if not isinstance(asks, QueryAsking):
            starts = are_features and isinstance(asks, ShiftAsking) and asks.place == "content"
            rows = count + self.class_token + starts
            return rows, rows
        before = 1 + (self.condition.kind == "class")
        if are_features:
            return before + count, before + count
        first, last = 0, count - 1
        if isinstance(schedule, GroupsSchedule):
            first, last = boundary_range(schedule.length, count, schedule.num_groups, None)
        return before + last + count - first, count - first
