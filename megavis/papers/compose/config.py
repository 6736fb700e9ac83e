"""Config keys of free compositions of tokens, schedule, asking, density and condition.

Each choice is a section whose `kind` determines its other keys (`sections.py`); `checks.py` checks
which can be combined. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import ConfigIssue, ObjectiveConfig, RunConfig
from megavis.papers.compose.checks import check_composition
from megavis.papers.compose.sections import (
    AnyAsking,
    AnyCondition,
    AnyDensity,
    AnySchedule,
    AnyTokens,
    AnyTransform,
    BridgeAsking,
    ClassCondition,
    ContextSchedule,
    GroupsSchedule,
    MemoryCondition,
    NoCondition,
    NoTransform,
    QueryAsking,
    SelfAsking,
    ShiftAsking,
    SquaredErrorDensity,
)
from megavis.schedules.boundaries import boundary_range


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
        density = self.density
        if self.predicts is not None:
            return (
                "a model with objective.predicts cannot continue from its own samples: it reads"
                f" {self.reads.kind}"
            )
        if self.schedule.kind in ("masked", "context"):
            return (
                f"objective.schedule {self.schedule.kind} has no order of generation; to generate,"
                " train with objective.schedule.kind one_by_one, groups or rounds"
            )
        if self.condition.kind == "features":
            return (
                "a model with objective.condition of kind features is conditioned on the whole"
                " image; train without it to generate"
            )
        if self.reads.kind == "frames":
            return "frames of a spectrogram cannot be shown as images"
        if self.schedule.kind == "rounds" and density.kind in ("squared_error", "diffusion"):
            return (
                "objective.schedule rounds keeps the most likely tokens of each round, and"
                f" {density.kind} has no likelihoods; to generate, train with"
                " objective.density.kind mixture"
            )
        if isinstance(density, SquaredErrorDensity) and density.normalize:
            return (
                "patches predicted with objective.density.normalize lack brightness and contrast;"
                " to generate, train with objective.density.normalize false"
            )
        return None

    @property
    def warning(self) -> str | None:
        """Sentence on what such a model cannot do after training, if it generates no images."""
        return self.no_images and f"this run will generate no images: {self.no_images}"

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
        yield from check_composition(self, config)

    @property
    def hidden_share(self) -> float:
        """Share of the tokens outside the context; 0 with other schedules."""
        return self.schedule.mask_ratio if isinstance(self.schedule, ContextSchedule) else 0.0

    def num_rows(self, count: int, are_features: bool) -> tuple[int, int]:
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
