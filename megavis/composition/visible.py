"""Asking of encoder-decoders: the encoder sees only known tokens, and a bridge adds the others.

Legend: b images, n positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.asking import AskedRows, Asking, Embedded
from megavis.model.flops import Workload
from megavis.model.visibility import VisibilityKind
from megavis.schedules.schedule import Arrangement, Question

if TYPE_CHECKING:
    from megavis.composition.reader import Reader, Role

ORDER = "order"
"""Name under which the places of all positions, int64 `[b, n]`, are carried to the bridge."""


class Visible(Asking):
    """One row per known token, in the order of the arrangement."""

    num_inputs = 2
    visibility: VisibilityKind = "full"
    extra_tensors = (ORDER,)

    def __init__(self, *, num_front: int = 0) -> None:
        """Build with `num_front` condition rows in front."""
        self.num_front = num_front

    @property
    def roles(self) -> tuple[Role, ...]:
        """Content, positions and front rows."""
        return ("content", "positions", *self._front)

    def rows(self, tokens: Tensor, question: Question, since: int = 0) -> AskedRows:
        """Return the known tokens, and the places of all positions."""
        order = question.plan.order.expand(len(tokens), -1).contiguous()
        return tokens[:, : question.known], order

    def feature_rows(self, tokens: Tensor, plan: Arrangement) -> AskedRows:
        """Return all tokens."""
        return self.rows(tokens, Question(plan, plan.num_positions, slice(0, 0)))

    def embed(self, reader: Reader, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`."""
        tokens, order = rows
        places = order[:, : tokens.shape[1]]
        hidden = reader.add_positions(reader.embed_content(tokens), places, "positions")
        front = reader.front_rows(hidden, known)
        hidden = torch.cat([front, hidden], dim=1)
        return Embedded(hidden, F.pad(places, (front.shape[1], 0)), {ORDER: order})

    def workload(self, plan: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of full attention over the known tokens."""
        rows = plan.num_content + self.num_front
        return Workload.of_one_stream(rows, num_outputs, causal=False)
