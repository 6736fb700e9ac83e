"""Asking: the rows of the blocks' input sequence, and which row predicts which token.

- `Shift`: a row holds the token before the one that it predicts.
- `Mask`: a row holds its own token, or a mask token if that is hidden.
- `Query`: query rows without a token follow the content rows, and no row attends to them.
- `InContext`: a row predicts its own token's position; all rows attend to the context's.
- `Visible`: rows of known tokens only, for an encoder; the bridge to a decoder adds the others.
- `Instruct`, in `instruct.py`: a row with a token's place precedes the row that holds it.

An asking kind has no parameters. `rows` runs on every process and turns tokens into the inputs of
the first layer; `embed` runs in the first layer and turns these into hidden states.

Legend: b images (1 if all images share a tensor), n positions, c content rows, q asked positions
(those to predict), m rows, h hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.parts import Parts, PositionRole, Role
from megavis.model.flops import Workload
from megavis.model.positions import NOWHERE, START
from megavis.model.visibility import VisibilityKind
from megavis.schedules.schedule import Arrangement, PredictionTargets

AskedRows = tuple[Tensor, ...]
Filler = Literal["vector", "zero_embedding", "zero_token"]
ORDER = "order"
"""Name under which the places of all positions, int64 `[b, n]`, are carried to a bridge."""


class Asking(ABC):
    """Maps tokens and an arrangement to rows, after `num_front` condition rows; embeds rows.

    Args:
        num_front: condition rows in front.
        places_front: add learned positions to the rows in front.
    """

    num_inputs: int
    """Number of tensors that `rows` returns."""
    visibility: VisibilityKind
    """Which row attends to which."""
    extra_tensors: tuple[str, ...] = ()
    """Names of the carried tensors that define the visibility, in order."""
    permutes: ClassVar[bool] = True
    """True if rows are in the order of the arrangement, False if in raster order."""
    fillers: tuple[Role, ...] = ()
    """Roles of the parts that stand for absent tokens."""

    def __init__(self, *, num_front: int = 0, places_front: bool = False) -> None:
        self.num_front, self.places_front = num_front, places_front

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the first layer's parts that rows use, if the paper has them."""
        front: tuple[Role, ...] = ("front",) if self.num_front else ()
        position: tuple[Role, ...] = ("front_position",) if self.places_front else ()
        return ("content", "positions", *self.fillers, *front, *position)

    @property
    def keeps_keys(self) -> bool:
        """True if a token's keys and values do not depend on later tokens."""
        return self.visibility == "causal"

    def num_final(self, step: PredictionTargets) -> int | None:
        """Return how many rows stay valid whatever a step samples; None: all of its rows."""
        return None

    @abstractmethod
    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return the rows that predict what is wanted.

        Args:
            tokens: `[b, at least known, ...]`, in the order of the arrangement (in raster order for
                `InContext`).
            since: number of rows in the KV cache; only rows after these are returned.
        """

    def feature_rows(self, tokens: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return one row per token, hiding no more than the arrangement requires."""
        return self.rows(tokens, arrangement.prediction_targets)

    def shape_of(self, rows: AskedRows) -> tuple[int, int]:
        """Return the number of images b, and of embedded rows per image."""
        return rows[0].shape[0], self.num_front + rows[0].shape[1]

    @abstractmethod
    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """Embed the output of `rows`; `known` has the conditions by the role of their part."""

    @abstractmethod
    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of blocks and head for an image with such an arrangement."""


@dataclass(frozen=True)
class Embedded:
    """Embedded rows.

    Attributes:
        hidden: `[b, m, h]`.
        places: int64 `[b or 1, m]`, the grid cell of each row, `START` or `NOWHERE`.
        carried: tensors that are passed along with the hidden states, by name.
        read_places: places of the rows that the head reads; None: of all.
    """

    hidden: Tensor
    places: Tensor
    carried: Mapping[str, Tensor]
    read_places: Tensor | None = None


class Shift(Asking):
    """Next-token prediction: row t holds the token at position t - 1, row 0 the start token.

    Args:
        place: position added to a row: of the token that it predicts (`asked`),
            of the token that it holds (`content`), or both, from separate tables.
        starts: begin with a start token; without one, row t holds the token at position t, so that
            no row predicts the first token, and the last row predicts nothing.
        sink: begin with a row that predicts nothing, before the start token.
        by_groups: a row attends to all rows of its token's group and of earlier groups, rather
            than to the rows before it; a prefix in group 0 then attends to itself fully.
    """

    num_inputs = 3

    def __init__(
        self,
        place: Literal["asked", "content", "both"],
        *,
        starts: bool = True,
        sink: bool = False,
        by_groups: bool = False,
    ) -> None:
        super().__init__()
        self.place, self.starts, self.sink, self.by_groups = place, starts, sink, by_groups
        fillers: dict[Role, bool] = {
            "asked_positions": place == "both", "start": starts, "sink": sink
        }  # fmt: skip
        self.fillers = tuple(role for role, is_needed in fillers.items() if is_needed)
        self.visibility: VisibilityKind = "two_stream" if by_groups else "causal"
        self.extra_tensors = ("content_groups", "query_groups") if by_groups else ()

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return tokens, their places, and per row its group or the place to add last.

        With a start token in front there is one row more than tokens.
        """
        since = max(0, since - self.sink)
        return self._between(
            tokens, wanted.arrangement, since + (not self.starts), wanted.asked.stop
        )

    def feature_rows(self, tokens: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return start token and all tokens; rows as in training if `place` is not `content`."""
        stop = arrangement.num_positions + (self.place == "content")
        return self._between(tokens, arrangement, int(not self.starts), stop)

    def _between(
        self, tokens: Tensor, arrangement: Arrangement, start: int, stop: int
    ) -> AskedRows:
        """Return the rows before positions [start, stop)."""
        before = slice(max(start - 1, 0), stop - 1)
        # Row t holds token t - 1. With a cache only rows from `start` on are wanted, and the start
        # token has been embedded.
        tokens, places = tokens[:, before], arrangement.order[:, before]
        if self.place != "content":
            return tokens, places, arrangement.order[:, start:stop]
        # The start token is in group 0.
        own, first = (arrangement.groups[:, before], 0) if self.by_groups else (places, START)
        own = F.pad(own, (1, 0), value=first) if start == 0 else own
        return tokens, places, own.expand(len(tokens), -1) if self.by_groups else own

    def shape_of(self, rows: AskedRows) -> tuple[int, int]:
        """Return the number of images, and of rows including the sink and the start token."""
        sink = self.sink and rows[2].shape[1] > rows[1].shape[1]
        return rows[0].shape[0], rows[2].shape[1] + sink

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, own = rows
        carried, tokens = parts.transformed(tokens)
        # A transform gives all tokens of its grid, and the last one predicts nothing.
        hidden = parts.embed_content(tokens[:, : places.shape[1]])
        if self.place != "asked":
            hidden = parts.add_positions(hidden, places, "positions")
        starts = own.shape[1] > places.shape[1]
        if starts:
            hidden = parts.prepend_start(hidden, known)
        if self.by_groups:
            # Two streams without queries are attention by groups.
            carried |= {"content_groups": own, "query_groups": own[:, :0]}
            own = F.pad(places, (1, 0), value=START) if starts else places
        elif self.place != "content":
            role: PositionRole = "positions" if self.place == "asked" else "asked_positions"
            hidden = parts.add_positions(hidden, own, role)
        if self.sink and starts:
            hidden, own = parts.prepend_sink(hidden), F.pad(own, (1, 0), value=START)
            if self.by_groups:
                carried["content_groups"] = F.pad(carried["content_groups"], (1, 0))
        return Embedded(hidden, own, carried)

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of one stream; kernels compute what a mask of groups hides."""
        rows = self.sink + arrangement.num_positions
        return Workload.of_one_stream(rows, num_outputs, causal=not self.by_groups)


class Mask(Asking):
    """One row per position, which holds its token, or a filler if that is hidden.

    Args:
        filler: what stands for a hidden token: a learned `vector`, a `zero_embedding`, or the
            embedding of a `zero_token`.
        marks: the first half of the width marks hidden and shown tokens, and the second half holds
            the token; each keeps every second channel of its vector.
    """

    num_inputs = 3
    visibility: VisibilityKind = "full"

    def __init__(
        self,
        *,
        num_front: int = 0,
        filler: Filler = "vector",
        marks: bool = False,
        places_front: bool = False,
    ) -> None:
        super().__init__(num_front=num_front, places_front=places_front)
        self.filler, self.marks = filler, marks
        fillers: dict[Role, bool] = {"mask": filler == "vector", "marks": marks}
        self.fillers = tuple(role for role, is_needed in fillers.items() if is_needed)

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return all tokens, their places, and the mask bool `[b, n]`, true where hidden.

        Asked positions are the last, as the head reads them.
        """
        order, hidden = wanted.arrangement.order, wanted.hidden
        hidden = wanted.arrangement.groups > 0 if hidden is None else hidden
        rows = tokens, order, hidden.expand(len(tokens), -1)
        tokens, order, hidden = (asked_last(each, wanted) for each in rows)
        return tokens, order, hidden

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, is_hidden = rows
        carried, tokens = parts.transformed(tokens)
        is_hidden = is_hidden[..., None]
        if self.filler == "zero_token":
            hidden = parts.embed_content(tokens.masked_fill(is_hidden, 0.0))
        else:
            hidden = parts.embed_content(tokens)
            # Hidden tokens are embedded too, so that shapes do not depend on the mask.
            hidden = torch.where(is_hidden, parts.vector("mask", hidden), hidden)
        if self.marks:
            for_hidden, for_shown = parts.part("marks").to(hidden.dtype)
            marks = torch.where(is_hidden, for_hidden, for_shown)
            # Every second channel of each, as in GIVT's released code.
            hidden = torch.cat([marks[..., ::2], hidden[..., ::2]], dim=-1)
        hidden = parts.add_positions(hidden, places, "positions")
        front = parts.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        # For rotary positions the front row is at the first cell.
        return Embedded(hidden, F.pad(places, (front.shape[1], 0)), carried)

    def shape_of(self, rows: AskedRows) -> tuple[int, int]:
        """Return the number of images, and of rows including those in front."""
        return rows[0].shape[0], self.num_front + rows[1].shape[1]

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of one stream with full attention."""
        rows = arrangement.num_positions + self.num_front
        return Workload.of_one_stream(rows, num_outputs, causal=False)


class Query(Asking):
    """Two streams: content rows that are attended to, and query rows that hold only a position.

    "XLNet: Generalized Autoregressive Pretraining for Language Understanding", section 2.3. Both
    streams share the projection of queries, as in XLNet's code; "Denoising Autoregressive
    Representation Learning", appendix A.5, which refers to it, has "an additional query head".

    Rows in front are in group 0.

    Args:
        starts: begin with a start token, in group 0.
        queries: False omits the query stream: the last content row before a token predicts it.
    """

    num_inputs = 5
    visibility: VisibilityKind = "two_stream"
    extra_tensors = ("content_groups", "query_groups")

    def __init__(
        self,
        *,
        num_front: int = 0,
        starts: bool = False,
        queries: bool = True,
        places_front: bool = False,
    ) -> None:
        super().__init__(num_front=num_front, places_front=places_front)
        self.starts, self.queries = starts, queries
        self.fillers = ("start", "query") if starts else ("query",)

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return the known tokens with their places and groups, and the asked places and groups.

        A start token has a group but neither token nor place. Queries of group 0 attend to the same
        rows as in group 1; the loss ignores them. Without queries, the last token is left
        out, since it predicts nothing.
        """
        arrangement, known = wanted.arrangement, wanted.known
        if self.queries:
            return self._streams(tokens, arrangement, known, wanted.asked)
        return self._streams(
            tokens, arrangement, min(known, arrangement.num_positions - 1), slice(0, 0)
        )

    def _streams(
        self, tokens: Tensor, arrangement: Arrangement, known: int, asked: slice
    ) -> AskedRows:
        count = len(tokens)
        order, groups = arrangement.order.expand(count, -1), arrangement.groups.expand(count, -1)
        content, places, own = tokens[:, :known], order[:, :known], groups[:, :known]
        if self.starts:
            own = F.pad(own, (1, 0))
        # A query of group 0 would attend to nothing.
        return content, places, own, order[:, asked], groups[:, asked].clamp(min=1)

    def feature_rows(self, tokens: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return only the content stream."""
        return self._streams(tokens, arrangement, arrangement.num_positions, slice(0, 0))

    def shape_of(self, rows: AskedRows) -> tuple[int, int]:
        """Return the number of images, and of rows in both streams, front and start included."""
        return rows[0].shape[0], self.num_front + rows[2].shape[1] + rows[3].shape[1]

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, places, groups, asked, asked_groups = rows
        hidden = parts.add_positions(parts.embed_content(tokens), places, "positions")
        if self.starts:
            hidden = parts.prepend_start(hidden, known)
            places = F.pad(places, (1, 0), value=START)
        query = parts.vector("query", hidden).expand(*asked.shape, -1)
        query = parts.add_positions(query, asked, "positions")
        front = parts.front_rows(hidden, known)
        num_front = front.shape[1]
        return Embedded(
            torch.cat([front, hidden, query], dim=1),
            # Place 0 for conditions, on which rotary positions act as the identity.
            F.pad(torch.cat([places, asked], dim=1), (num_front, 0)),
            {
                # Conditions are in group 0, to which all rows attend.
                "content_groups": F.pad(groups, (num_front, 0)).contiguous(),
                "query_groups": asked_groups.contiguous(),
            },
        )

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of both streams, with keys and values only for content."""
        visible = self.num_front + self.starts + arrangement.num_content
        asked = arrangement.num_positions - arrangement.first_asked
        if not self.queries:
            return Workload(visible, visible, float(visible), visible, num_outputs)
        return Workload(visible + asked, visible, float(visible), asked, num_outputs)


class InContext(Asking):
    """One row per token, which attends to the context rows; some rows get their position."""

    num_inputs = 3
    visibility: VisibilityKind = "context"
    extra_tensors = ("context",)
    permutes = False

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return tokens in raster order, the context rows int64 `[b, c]`, and the placed rows."""
        arrangement = wanted.arrangement
        return self.rows_of(tokens, arrangement.order[:, : wanted.known], arrangement.num_placed)

    def rows_of(self, tokens: Tensor, context: Tensor, num_placed: int) -> AskedRows:
        """Return the rows of tokens `[b, n, ...]` with the context int64 `[b, c]`."""
        placed, front = context[:, :num_placed], self.num_front
        own = torch.arange(front, device=context.device).expand(len(context), -1)
        # Rows in front are attended to by all, and shift the indices of the others.
        context = torch.cat([own, context + front], dim=1)
        return tokens, context.contiguous(), placed.contiguous()

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, context, placed = rows
        hidden = parts.embed_content(tokens)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        shows = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        shows = shows.scatter(1, placed, True)[..., None]
        # Select with a mask rather than an index: rows keep their places, and shapes do not depend
        # on the draw.
        placed_hidden = parts.add_positions(hidden, places, "positions")
        hidden = torch.where(shows, placed_hidden, hidden)
        front = parts.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        places = F.pad(places, (front.shape[1], 0), value=NOWHERE)
        return Embedded(hidden, places, {"context": context})

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of all rows, with keys and values only for the context."""
        rows, visible = (
            arrangement.num_positions + self.num_front,
            arrangement.num_content + self.num_front,
        )
        return Workload(rows, visible, float(visible), rows, num_outputs)


class Visible(Asking):
    """One row per known token, in the arrangement's order.

    Where their number is drawn for each image, rows of hidden tokens follow in group 1: known ones,
    in group 0 as those in front, do not attend to them, and the bridge replaces them.

    Args:
        hides: whether the number of hidden tokens is drawn for each image.
    """

    def __init__(
        self, *, num_front: int = 0, hides: bool = False, places_front: bool = False
    ) -> None:
        super().__init__(num_front=num_front, places_front=places_front)
        self.hides = hides
        self.visibility: VisibilityKind = "two_stream" if hides else "full"
        self.extra_tensors = (ORDER, *(("content_groups", "query_groups") if hides else ()))
        self.num_inputs = 3 if hides else 2

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return the known tokens, the places of all positions, and the groups of the tokens.

        Asked positions are the last, as the head reads them.
        """
        order = asked_last(wanted.arrangement.order, wanted).expand(len(tokens), -1)
        # Contiguous, because a pipeline stage may send it to the bridge.
        rows = (tokens[:, : wanted.known], order.contiguous())
        groups = wanted.arrangement.groups[:, : wanted.known]
        return (*rows, groups.expand(len(tokens), -1)) if self.hides else rows

    def feature_rows(self, tokens: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return all tokens."""
        return self.rows(
            tokens, PredictionTargets(arrangement, arrangement.num_positions, slice(0, 0))
        )

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, order, *groups = rows
        places = order[:, : tokens.shape[1]]
        hidden = parts.add_positions(parts.embed_content(tokens), places, "positions")
        front = parts.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        carried = {ORDER: order}
        if self.hides:
            # Two streams without queries are attention by groups.
            own = F.pad(groups[0], (front.shape[1], 0)).contiguous()
            carried |= {"content_groups": own, "query_groups": own[:, :0]}
        return Embedded(hidden, F.pad(places, (front.shape[1], 0)), carried)

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of full attention over the rows of tokens."""
        rows = arrangement.num_content + self.num_front
        return Workload.of_one_stream(rows, num_outputs, causal=False)


def asked_last(values: Tensor, wanted: PredictionTargets) -> Tensor:
    """Move the asked positions of `[b, n, ...]` behind all others, if some follow them."""
    asked = wanted.asked
    if asked.stop >= values.shape[1] or asked.start == asked.stop:
        return values
    parts = (values[:, : asked.start], values[:, asked.stop :], values[:, asked])
    return torch.cat(parts, dim=1)
