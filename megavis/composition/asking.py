"""How a token asks to be predicted: which rows the blocks see, and what each row holds.

- `Shift`: a row holds the token before the one that it predicts.
- `Mask`: a row holds its own token, or nothing where that is hidden.
- `Query`: rows that hold no token stand behind those that do, and nobody sees them.
- `InContext`: a row asks about itself; all rows see those of the context.

An asking kind has no parameters. `rows` runs on every process and turns tokens into the tensors
that the first layer takes; `embed` runs in the first layer and turns these into hidden states.

Legend: b images (1 where all images share a tensor), n positions, c content rows, q asked
positions, m rows, h hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.model.flops import Workload
from megavis.model.relative import OFF_GRID
from megavis.model.visibility import VisibilityKind
from megavis.schedules.base import Arrangement, Question

if TYPE_CHECKING:
    from megavis.composition.reader import Reader, Role

START = -1
"""The place of a start token, which stands to the left of the first cell of the grid."""

AskedRows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Embedded:
    """What a first layer makes of rows.

    Attributes:
        hidden: `[b, m, h]`.
        coordinates: int64 `[b or 1, m, 2]`, row and column of each row on the grid.
        carried: tensors that travel with the hidden states, by name.
    """

    hidden: Tensor
    coordinates: Tensor
    carried: Mapping[str, Tensor]


class Asking(ABC):
    """From tokens and an arrangement to rows, and from rows to hidden states."""

    num_inputs: ClassVar[int]
    """Tensors that `rows` gives."""
    visibility: VisibilityKind
    """Which row sees which."""
    extra_tensors: tuple[str, ...] = ()
    """Names of the tensors that say so, in the order in which they travel."""
    permutes: ClassVar[bool] = True
    """True where rows stand in the order of the arrangement, not in raster order."""
    num_front: int = 0
    """Condition rows in front of all others."""

    @property
    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """Parts of the first layer that rows are made of, where a paper has them."""

    @property
    def keeps_keys(self) -> bool:
        """True where keys and values of a token do not change as others follow."""
        return self.visibility == "causal"

    @property
    def _front(self) -> tuple[Role, ...]:
        return ("front",) if self.num_front else ()

    @abstractmethod
    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return the rows that answer a question.

        Args:
            tokens: `[b, at least known, ...]`, in the order of the plan (of `InContext`: in raster
                order).
            question: what is known, and what is asked for.
            since: positions whose keys and values are kept; rows are wanted for those after.
        """

    @abstractmethod
    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return rows in which nothing is hidden that need not be, each of them a token's."""

    @abstractmethod
    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """Embed rows.

        Args:
            reader: the first layer, whose parts these become.
            rows: as `rows` gives them.
            known: the condition, by the role of the part that takes it.
        """

    @abstractmethod
    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Return what blocks and head compute for an image of an arrangement like this."""


class Shift(Asking):
    """Next-token prediction: row t holds the token at position t - 1, row 0 the start token."""

    num_inputs = 3

    def __init__(
        self, place: Literal["asked", "content", "both"], *, by_groups: bool = False
    ) -> None:
        """Build.

        Args:
            place: whose position is added to a row: that of the token that it predicts, of the
                token that it holds, or both, each from a table of its own.
            by_groups: a row sees all rows of the group of its token and of earlier ones, in place
                of the rows before it alone; a prefix of group 0 then sees itself.
        """
        self.place, self.by_groups = place, by_groups
        self.visibility: VisibilityKind = "two_stream" if by_groups else "causal"
        self.extra_tensors = ("content_groups", "query_groups") if by_groups else ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """Tokens, places, what stands before the first."""
        asked: tuple[Role, ...] = ("asked_positions",) if self.place == "both" else ()
        return ("content", "positions", *asked, "start")

    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return tokens, their places with `START` in front, and the places (groups) asked for."""
        return self._between(tokens, question.plan, since, question.asked.stop)

    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return start and all tokens; as in training where rows know what they predict."""
        last = 0 if self.place == "content" else 1
        return self._between(tokens, plan, 0, plan.num_positions + 1 - last)

    def _between(self, tokens: Tensor, plan: Arrangement, start: int, stop: int) -> AskedRows:
        """Return the rows [start, stop)."""
        first = max(start - 1, 0)
        before, places = tokens[:, first : stop - 1], plan.order[:, first : stop - 1]
        if start == 0:
            before, places = pad_front(before), F.pad(places, (1, 0), value=START)
        if not self.by_groups:
            return before, places, plan.order[:, start:stop]
        assert self.place == "content"
        groups = plan.groups[:, first : stop - 1]
        groups = F.pad(groups, (1, 0)) if start == 0 else groups
        return before, places, groups.expand(len(before), -1)

    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, asked = rows
        carried: dict[str, Tensor] = {}
        if reader.part("transform") is not None:
            carried[TRANSFORMED] = tokens if tokens.ndim == 3 else reader.transformed(tokens)
        if tokens.ndim == 4:
            tokens = pad_front(carried[TRANSFORMED])[:, :-1]
        hidden = reader.embed_content(tokens)
        if self.place != "asked":
            own_cells = reader.cells(places.clamp(min=0))
            hidden = reader.add_positions(hidden, own_cells, "positions")
        hidden = reader.with_starts(hidden, places == START, known)
        if self.place == "content":
            if self.by_groups:
                carried |= {"content_groups": asked, "query_groups": asked[:, :0]}
            return Embedded(hidden, coordinates_of(reader, places), carried)
        cells = reader.cells(asked)
        hidden = reader.add_positions(
            hidden, cells, "positions" if self.place == "asked" else "asked_positions"
        )
        return Embedded(hidden, cells, carried)

    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Return that of one causal stream."""
        return Workload.of_one_stream(plan.num_positions, num_outputs, causal=True)


TRANSFORMED = "tokens"
"""Name under which a learned transform's tokens travel to the head, where they are scored."""


class Mask(Asking):
    """A row for each position, which holds its token or, where that is hidden, a filler."""

    num_inputs = 3
    visibility: VisibilityKind = "full"

    def __init__(self, *, num_front: int = 0) -> None:
        """Build; so many condition rows stand in front."""
        self.num_front = num_front

    @property
    def roles(self) -> tuple[Role, ...]:
        """Tokens, places, and what stands for hidden ones."""
        return ("content", "positions", "mask", *self._front)

    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return all tokens, their places, and bool `[b, n]`, true where one is hidden."""
        order, hidden = question.plan.order, question.hidden
        hidden = question.plan.groups > 0 if hidden is None else hidden
        return tokens, order, hidden.expand(len(tokens), -1)

    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return all tokens, none hidden but those that the plan hides."""
        return self.rows(tokens, plan.question)

    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, is_hidden = rows
        hidden, cells = reader.embed_content(tokens), reader.cells(places)
        filler = reader.vector("mask", hidden)
        hidden = torch.where(is_hidden[..., None], filler, hidden)
        hidden = reader.add_positions(hidden, cells, "positions")
        front = reader.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        return Embedded(hidden, F.pad(cells, (0, 0, front.shape[1], 0)), {})

    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Return that of one stream in which all see all."""
        rows = plan.num_positions + self.num_front
        return Workload.of_one_stream(rows, num_outputs, causal=False)


class Query(Asking):
    """Two streams: content that is seen, and queries that know their place alone.

    "XLNet: Generalized Autoregressive Pretraining for Language Understanding", section 2.3.
    """

    num_inputs = 5
    visibility: VisibilityKind = "two_stream"
    extra_tensors = ("content_groups", "query_groups")

    def __init__(self, *, num_front: int = 0, starts: bool = False, queries: bool = True) -> None:
        """Build.

        Args:
            num_front: condition rows in front, which stand in group 0.
            starts: a start token stands in front, in group 0.
            queries: False leaves the queries away: the last content row before a token predicts
                it.
        """
        self.num_front, self.starts, self.queries = num_front, starts, queries

    @property
    def roles(self) -> tuple[Role, ...]:
        """Tokens, places, what is in front, and what stands for a token that is asked for."""
        start: tuple[Role, ...] = ("start",) if self.starts else ()
        return ("content", "positions", *start, "query", *self._front)

    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return the known tokens, their places and groups, and the places and groups asked for.

        Queries of group 0 see what those of group 1 see; nothing is learned from them. Without
        queries the last token of all predicts nothing.
        """
        plan, known = question.plan, question.known
        if self.queries:
            return self._streams(tokens, plan, known, question.asked)
        return self._streams(tokens, plan, min(known, plan.num_positions - 1), slice(0, 0))

    def _streams(self, tokens: Tensor, plan: Arrangement, known: int, asked: slice) -> AskedRows:
        count = len(tokens)
        order, groups = plan.order.expand(count, -1), plan.groups.expand(count, -1)
        content, places, own = tokens[:, :known], order[:, :known], groups[:, :known]
        if self.starts:
            content, own = pad_front(content), F.pad(own, (1, 0))
            places = F.pad(places, (1, 0), value=START)
        return content, places, own, order[:, asked], groups[:, asked].clamp(min=1)

    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return the content stream alone."""
        return self._streams(tokens, plan, plan.num_positions, slice(0, 0))

    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, groups, asked, asked_groups = rows
        own_cells = reader.cells(places.clamp(min=0))
        hidden = reader.add_positions(reader.embed_content(tokens), own_cells, "positions")
        if self.starts:
            hidden = reader.with_starts(hidden, places == START, known)
        cells = coordinates_of(reader, places)
        asked_cells = reader.cells(asked)
        query = reader.vector("query", hidden).expand(*asked.shape, -1)
        query = reader.add_positions(query, asked_cells, "positions")
        front = reader.front_rows(hidden, known)
        num_front = front.shape[1]
        return Embedded(
            torch.cat([front, hidden, query], dim=1),
            # A condition has no place: rotary positions do not turn it.
            F.pad(torch.cat([cells, asked_cells], dim=1), (0, 0, num_front, 0)),
            {
                # It stands in group 0, which all see.
                "content_groups": F.pad(groups, (num_front, 0)).contiguous(),
                "query_groups": asked_groups.contiguous(),
            },
        )

    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Return both streams; keys and values are those of content alone."""
        seen = self.num_front + self.starts + plan.num_content
        asked = plan.num_positions - plan.first_asked
        if not self.queries:
            return Workload(seen, seen, float(seen), seen, num_outputs)
        return Workload(seen + asked, seen, float(seen), asked, num_outputs)


class InContext(Asking):
    """A row for each token, which sees the rows of the context; some show their place."""

    num_inputs = 3
    visibility: VisibilityKind = "context"
    extra_tensors = ("context",)
    permutes = False

    def __init__(self, *, num_front: int) -> None:
        """Build; so many condition rows in front belong to the context."""
        self.num_front = num_front

    @property
    def roles(self) -> tuple[Role, ...]:
        """Tokens, and places of those that show them."""
        return ("content", "positions", *self._front)

    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return tokens in raster order, the rows int64 `[b, c]` of the context, those placed."""
        plan = question.plan
        return self.rows_of(tokens, plan.order[:, : question.known], plan.num_placed)

    def rows_of(self, tokens: Tensor, context: Tensor, num_placed: int) -> AskedRows:
        """Return the rows of tokens `[b, n, ...]`, of which `context` `[b, c]` are seen."""
        placed, front = context[:, :num_placed], self.num_front
        own = torch.arange(front, device=context.device).expand(len(context), -1)
        context = torch.cat([own, context + front], dim=1)
        return tokens, context.contiguous(), placed.contiguous()

    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return all rows; all are seen, those that the plan places show their place."""
        return self.rows(tokens, plan.question)

    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, context, placed = rows
        hidden = reader.embed_content(tokens)
        cells = reader.cells(torch.arange(hidden.shape[1], device=hidden.device)[None])
        shows = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        shows = shows.scatter(1, placed, True)[..., None]
        placed_hidden = reader.add_positions(hidden, cells, "positions")
        hidden = torch.where(shows, placed_hidden, hidden)
        front = reader.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        cells = F.pad(cells, (0, 0, front.shape[1], 0), value=OFF_GRID)
        return Embedded(hidden, cells, {"context": context})

    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Count keys and values of the context alone."""
        rows, seen = plan.num_positions + self.num_front, plan.num_content + self.num_front
        return Workload(rows, seen, float(seen), rows, num_outputs)


def pad_front(tokens: Tensor) -> Tensor:
    """Put a row of zeros in front of tokens `[b, c]` or `[b, c, d]`."""
    return F.pad(tokens, (0, 0) * (tokens.ndim - 2) + (1, 0))


def coordinates_of(reader: Reader, places: Tensor) -> Tensor:
    """Return row and column int64 `[..., 2]` of places, some of them `START`."""
    cells = reader.cells(places.clamp(min=0))
    # The start token's clamped cell is row 0, column 0: it stands one to the left of it.
    return torch.stack([cells[..., 0], cells[..., 1] - (places == START).long()], dim=-1)
