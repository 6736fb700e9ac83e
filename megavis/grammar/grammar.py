"""A paper in words: what it reads, when and from which rows it predicts what, and given what."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from megavis.config.schema import RunConfig
from megavis.config.section import PositionKind, Section
from megavis.grammar.faults import Fault
from megavis.grammar.words import (
    Adapter,
    AnyAsking,
    AnyCondition,
    AnyDensity,
    AnySchedule,
    AnyTokens,
    EncodedImage,
    InitialWeights,
    Labels,
    Query,
    Rounds,
    Rows,
    SquaredError,
    Visible,
)


class Words(Section):
    """The choices that define a paper."""

    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"density", "predicts", "weights"})

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
    condition: Annotated[AnyCondition | None, Field(discriminator="kind")] = None
    """What stands at the start or in front; default: nothing."""
    memory: EncodedImage | None = None
    """What all rows attend to besides each other; default: nothing."""
    transform: Adapter | None = None
    """Learned transform of latents before they are read and predicted; default: none."""
    weights: InitialWeights = InitialWeights()
    """Initial weights."""


class Grammar(Words):
    """The choices of a run, resolved: none is left to a default of the paper."""

    positions: PositionKind
    """Position encoding: `model.positions`, or the paper's."""

    def num_tokens(self, run: RunConfig) -> int:
        """Return the number of tokens n of an image."""
        height, width = self.reads.grid(run.data)
        return height * width

    @property
    def predicted(self) -> AnyTokens:
        """Predicted tokens."""
        return self.predicts or self.reads

    @property
    def num_front(self) -> int:
        """Rows in front of all others."""
        return self.condition.num_front if self.condition and self.asks.has_front else 0

    @property
    def places_front(self) -> bool:
        """Whether each row in front has a learned position of its own, as several have."""
        return isinstance(self.condition, Labels) and self.num_front > 1

    @property
    def is_modulated(self) -> bool:
        """Whether a condition modulates norms and branches of the blocks."""
        return isinstance(self.condition, Labels) and self.condition.modulation != "none"

    def num_row_vectors(self, count: int) -> int:
        """Return the rows of `count` tokens with vectors that modulate too; 0 without these."""
        condition = self.condition
        if not isinstance(condition, Labels) or condition.modulation != "class_and_row":
            return 0
        kinds = (self.rows(count, for_features=each) for each in (False, True))
        return max(rows.blocks for rows in kinds)

    @property
    def num_further_blocks(self) -> int:
        """Blocks of the memory's encoder, and of a decoder."""
        encoder = self.memory.num_layers if self.memory else 0
        decoder = self.asks.decoder.num_layers if isinstance(self.asks, Visible) else 0
        return encoder + decoder

    @property
    def null_label_key(self) -> str | None:
        """Key that adds an input for "no class"; None if there is one, or no class."""
        lacks_one = isinstance(self.condition, Labels) and not self.condition.dropout
        return "condition.dropout" if lacks_one else None

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is -log p of an image's tokens."""
        is_exact = self.schedule.is_sequential and not self.schedule.num_given
        return is_exact and self.predicts is None and self.density.has_likelihood

    def rows(self, count: int, *, for_features: bool = False) -> Rows:
        """Return the rows of `count` tokens in training, or of those that features are made of."""
        if for_features:
            return self.asks.feature_rows(self.num_front, count)
        return self.asks.rows(self.schedule, self.num_front, count)

    def num_skipped(self, count: int) -> int:
        """Return the leading rows of `count` tokens that reach the head and predict nothing."""
        return self.asks.num_skipped(self.schedule, self.num_front, count)

    @property
    def cannot_generate(self) -> Fault | None:
        """Why such models generate no images; None if they do."""
        reads, schedule, density = self.reads.kind, self.schedule, self.density
        if self.predicts is not None:
            text = f"a model that reads {reads} and predicts {self.predicts.kind} cannot continue"
            return Fault("predicts", f"{text} from its own samples", "set it to null")
        if not schedule.generates:
            text = f"{schedule.kind} has no order of generation"
            return Fault("schedule.kind", text, "set it to one_by_one, groups or rounds")
        if self.condition is not None and self.condition.kind == "pooled_features":
            text = "the model is conditioned on features of the whole image"
            return Fault("condition", text, "set it to null")
        if reads == "frames":
            return Fault("reads.kind", "frames of a spectrogram cannot be shown as images", "")
        if isinstance(self.asks, Query) and self.asks.streams == "one":
            text = "rows of one stream cannot predict tokens in any order"
            return Fault("asks.streams", text, "set it to two")
        by_confidence = isinstance(schedule, Rounds) and schedule.chosen == "confidence"
        if by_confidence and not density.has_likelihood:
            text = f"rounds keeps the most likely tokens, and {density.kind} has no likelihoods"
            remedy = "set it to gaussian_mixture, or {schedule.chosen} to order"
            return Fault("density.kind", text, remedy)
        if isinstance(density, SquaredError) and density.normalize:
            text = "patches that are predicted normalised lack brightness and contrast"
            return Fault("density.normalize", text, "set it to false")
        return None
