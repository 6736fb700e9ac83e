"""Asking: which row predicts a token.

Rows are counted here, without torch, for the layouts that divide them.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from megavis.config.schema import Fraction, Positive
from megavis.config.section import Section
from megavis.grammar.words.schedules import ScheduleWord


class Rows(NamedTuple):
    """Rows of an image, in the blocks, before the head, and in the blocks of a decoder."""

    blocks: int
    head: int
    decoder: int = 0


class AskWord(Section):
    """Which row predicts a token."""

    kind: str
    norm: bool = False
    """Normalise the rows, with their positions, before the first block."""
    schedules: ClassVar[tuple[str, ...]]
    """Kinds of schedule that fit."""
    has_front: ClassVar[bool] = True
    """Whether a condition can stand in front of all rows."""
    predicts_context: ClassVar[bool] = True
    """Whether tokens of the schedule's context are predicted too."""
    holds_hidden: ClassVar[bool] = True
    """Whether there are rows for hidden tokens below the first block."""

    @property
    def asks_several(self) -> bool:
        """Whether several tokens of an order can be asked for at once, without those between."""
        return False

    @property
    def first_asked(self) -> int:
        """First position that a row can predict."""
        return 0

    def rows(self, schedule: ScheduleWord, front: int, count: int) -> Rows:
        """Return the rows of `count` tokens in training, with `front` rows before all others."""
        return self.feature_rows(front, count)

    def feature_rows(self, front: int, count: int) -> Rows:
        """Return the rows of `count` tokens from which features are made."""
        return Rows(front + count, front + count)

    def num_skipped(self, schedule: ScheduleWord, front: int, count: int) -> int:
        """Return the leading rows that reach the head and predict nothing."""
        return front


class Shift(AskWord):
    """A row holds the token before the one that it predicts; the first one a start token."""

    schedules: ClassVar[tuple[str, ...]] = ("one_by_one",)
    has_front: ClassVar[bool] = False

    kind: Literal["shift"] = "shift"
    place: Literal["asked", "content", "both"] = "asked"
    """Position added to a row: of the token that it predicts (`asked`), of the token
    that it holds (`content`), or both, from separate tables."""
    start: bool = True
    """Begin with a learned start token. Without one, no row predicts the first token, which must be
    given (`schedule.prefix`)."""
    sink: bool = False
    """Begin with a learned row that predicts nothing, before the start token: all others attend to
    it."""
    zero_start: bool = False
    """With `content`: zero the queries and keys of the start token, or of the class in its place,
    and of a sink, instead of rotating them, as in LlamaGen's released code."""

    @property
    def first_asked(self) -> int:
        """The second position without a start token."""
        return 0 if self.start else 1

    def feature_rows(self, front: int, count: int) -> Rows:
        """Return the tokens, after the start token where it has a row of its own."""
        rows = self.sink + count + (self.place == "content") - self.first_asked
        return Rows(rows, rows)

    def rows(self, schedule: ScheduleWord, front: int, count: int) -> Rows:
        """Return one row per predicted token; without a start token, one per token."""
        return Rows(self.sink + count, self.sink + count)

    def num_skipped(self, schedule: ScheduleWord, front: int, count: int) -> int:
        """Return the row before the start token."""
        return int(self.sink)


class Mask(AskWord):
    """One row per token, with a mask token for hidden ones."""

    schedules: ClassVar[tuple[str, ...]] = ("masked", "rounds")

    kind: Literal["mask"] = "mask"
    filler: Literal["vector", "zero_embedding", "zero_token"] = "vector"
    """What stands for a hidden token: a learned `vector`, a `zero_embedding`, or the embedding of a
    `zero_token`, which ids do not have."""
    marks: bool = False
    """Mark hidden and shown tokens in half of the width, and hold the token in the other half."""


class Query(AskWord):
    """Query rows without a token predict the tokens; no row attends to them."""

    schedules: ClassVar[tuple[str, ...]] = ("one_by_one", "groups")

    kind: Literal["query"] = "query"
    start: bool = True
    """Begin with a learned start token."""
    streams: Literal["two", "one"] = "two"
    """With `one` there are no query rows: the row before a token predicts it, without its
    position."""

    @property
    def asks_several(self) -> bool:
        """Whether there are queries, which attend to no other query."""
        return self.streams == "two"

    def feature_rows(self, front: int, count: int) -> Rows:
        """Return the content stream."""
        rows = front + self.start + count
        return Rows(rows, rows)

    def rows(self, schedule: ScheduleWord, front: int, count: int) -> Rows:
        """Return both streams; queries alone reach the head."""
        attended, first = schedule.content(count)
        content = front + self.start + attended
        if self.streams == "one":
            return Rows(content, content)
        return Rows(content + count - first, count - first)

    def num_skipped(self, schedule: ScheduleWord, front: int, count: int) -> int:
        """Return 0 with queries; without, all rows before the last that precedes a token."""
        return 0 if self.streams == "two" else front + self.start - 1


class Instruct(AskWord):
    """Rows alternate: one holds a place and predicts the token there, the next holds the token."""

    schedules: ClassVar[tuple[str, ...]] = ("one_by_one",)
    has_front: ClassVar[bool] = False

    kind: Literal["instruct"] = "instruct"
    zero_start: bool = False
    """Zero the queries and keys of the start token, or of the class in its place, instead of
    rotating them: every row attends to it with a score of 0."""

    @property
    def asks_several(self) -> bool:
        """True: rows with places may follow each other."""
        return True

    def feature_rows(self, front: int, count: int) -> Rows:
        """Return a start token, all places, and all tokens but the last."""
        return Rows(2 * count, 2 * count)

    def rows(self, schedule: ScheduleWord, front: int, count: int) -> Rows:
        """Return the same; the head reads those with places."""
        return Rows(2 * count, count)


class InContext(AskWord):
    """One row per token, which predicts that token's position; all attend to the context."""

    schedules: ClassVar[tuple[str, ...]] = ("context",)
    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"given_ratio"})

    kind: Literal["in_context"] = "in_context"
    given_ratio: Fraction = 0.0
    """Share of the tokens, within the context, whose positions are given, as `model.positions`."""


class DecoderConfig(Section):
    """Blocks on top of an encoder; `model` has all other sizes."""

    num_layers: Positive = 8
    """Number of decoder blocks."""
    hidden_size: Positive = 512
    """Width of the decoder, a multiple of 4."""
    num_attention_heads: Positive = 16
    """Attention heads of the decoder."""


class Visible(AskWord):
    """An encoder sees only known tokens; a bridge to a decoder adds mask tokens for the others."""

    schedules: ClassVar[tuple[str, ...]] = ("context", "rounds")
    predicts_context: ClassVar[bool] = False
    holds_hidden: ClassVar[bool] = False
    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"decoder"})

    kind: Literal["visible"] = "visible"
    decoder: DecoderConfig = DecoderConfig()
    """The decoder."""
    tokens_decay: bool = False
    """Apply weight decay to mask token and learned front tokens in pre-training."""

    def rows(self, schedule: ScheduleWord, front: int, count: int) -> Rows:
        """Return the rows of the encoder, and of the decoder, which reach the head."""
        _, seen = schedule.shown(count)
        return Rows(front + seen, front + count, decoder=front + count)

    def num_skipped(self, schedule: ScheduleWord, front: int, count: int) -> int:
        """Return the rows that the encoder has seen in every image."""
        return front + schedule.shown(count)[0]


AnyAsking = InContext | Visible | Shift | Mask | Query | Instruct
