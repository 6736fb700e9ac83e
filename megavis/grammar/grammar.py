"""A paper in words: what it reads, when and from which rows it predicts what, and given what."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from megavis.config.schema import RunConfig
from megavis.config.section import PositionKind, Section
from megavis.grammar.boundaries import context_size
from megavis.grammar.words import (
    Adapter,
    AnyAsking,
    AnyCondition,
    AnyDensity,
    AnySchedule,
    AnyTokens,
    Context,
    EncodedImage,
    InitialWeights,
    Labels,
    OneByOne,
    Query,
    Shift,
    SquaredError,
    Visible,
)


class Rows(NamedTuple):
    """Rows of an image, in the blocks, before the head, and in the blocks of a decoder."""

    blocks: int
    head: int
    decoder: int = 0


class Fault(NamedTuple):
    """A word that does not fit.

    Attributes:
        key: of the grammar, such as `schedule.num_groups`, or of the run, such as `data.train`.
        text: what is wrong, beginning with the value; keys of the grammar stand in braces.
        remedy: choices that work.
    """

    key: str
    text: str
    remedy: str


class Words(Section):
    """The choices that define a paper."""

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
    """Position encoding: that of `model.positions`, or the paper's."""

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
    def num_further_blocks(self) -> int:
        """Blocks of the memory's encoder, and of the decoder above a bridge."""
        encoder = self.memory.num_layers if self.memory else 0
        return encoder + (self.asks.decoder.num_layers if isinstance(self.asks, Visible) else 0)

    @property
    def null_label_key(self) -> str | None:
        """Key that adds an input for "no class"; None if there is one, or no class."""
        has_none = isinstance(self.condition, Labels) and not self.condition.dropout
        return "condition.dropout" if has_none else None

    @property
    def weights_need_their_seed(self) -> bool:
        """Whether weights are only valid with the `seed` that they were trained with."""
        schedule = self.schedule
        return (
            isinstance(schedule, OneByOne)
            and schedule.order == "random"
            and schedule.drawn == "run"
        )

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is -log p of an image's tokens."""
        is_sequential = isinstance(self.schedule, OneByOne) and not self.schedule.prefix
        return is_sequential and self.predicts is None and self.density.has_likelihood

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
        if schedule.kind == "rounds" and not density.has_likelihood:
            text = f"rounds keeps the most likely tokens, and {density.kind} has no likelihoods"
            return Fault("density.kind", text, "set it to gaussian_mixture")
        if isinstance(density, SquaredError) and density.normalize:
            text = "patches that are predicted normalised lack brightness and contrast"
            return Fault("density.normalize", text, "set it to false")
        return None

    def rows(self, count: int, *, for_features: bool = False) -> Rows:
        """Return the rows of `count` tokens in training, or of those that features are made of."""
        asks, front = self.asks, self.num_front
        if isinstance(asks, Query):
            before = front + asks.start
            if for_features:
                return Rows(before + count, before + count)
            attended, first = self.schedule.content(count)
            if asks.streams == "one":
                return Rows(before + attended, before + attended)
            return Rows(before + attended + count - first, count - first)
        if isinstance(asks, Visible) and not for_features:
            assert isinstance(self.schedule, Context)
            seen = context_size(count, self.schedule.mask_ratio)
            return Rows(front + seen, front + count, decoder=front + count)
        starts = for_features and isinstance(asks, Shift) and asks.place == "content"
        return Rows(front + count + starts, front + count + starts)
