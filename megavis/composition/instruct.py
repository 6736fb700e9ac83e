"""Asking by instructions: a row that holds a token's place precedes the row that holds the token.

"RandAR: Decoder-only Autoregressive Visual Generation in Random Orders", section 3.2. Both kinds of
rows are attended to, so that an ordinary causal decoder predicts tokens in any order. Several
consecutive instructions predict as many tokens at once (section 3.3).

Legend: b images (1 if all images share a tensor), n positions, c rows of tokens, i of instructions,
q asked positions, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.asking import AskedRows, Asking, Embedded
from megavis.composition.parts import Parts, Role
from megavis.model.core import READ_ROWS
from megavis.model.flops import Workload
from megavis.model.positions import START
from megavis.model.visibility import VisibilityKind
from megavis.schedules.schedule import Arrangement, PredictionTargets


class Instruct(Asking):
    """Rows alternate: start token, place 0, token 0, place 1, token 1, ..., place n - 1.

    The row with a place predicts the token at that place. Attention is causal. The last token has
    no row in training, since it predicts nothing: n tokens have 2n rows.

    Where several tokens are asked at once, their places follow each other, so that each also
    attends to the places before it, but to none of the tokens that are asked with it.
    """

    num_inputs = 4
    visibility: VisibilityKind = "causal"
    extra_tensors = (READ_ROWS,)
    fillers: tuple[Role, ...] = ("start", "query")

    def num_final(self, step: PredictionTargets) -> int | None:
        """Return the rows up to the first place that was asked.

        The tokens that the step samples are inserted between the later ones.
        """
        return 2 * (step.asked.start + 1)

    def rows(self, tokens: Tensor, wanted: PredictionTargets, since: int = 0) -> AskedRows:
        """Return tokens, their places, the places of instructions, and the rows to read.

        A start token in front, at `START`, has a place but no token. `since` must be even: the
        first row then holds a token.
        """
        known, read = wanted.known, wanted.asked.stop - wanted.asked.start
        # The cache has the known tokens before `cached`, and one more instruction.
        cached = max(since // 2 - 1, 0)
        first = cached + 1 if since else 0
        order = wanted.arrangement.order
        tokens, places = tokens[:, cached:known], order[:, cached:known]
        if not since:
            places = F.pad(places, (1, 0), value=START)
        instructions = order[:, first : wanted.asked.stop]
        number = torch.arange(instructions.shape[1], device=places.device)
        # Instruction t follows t + 1 rows of tokens, or all of them if there are fewer.
        rows = number + (number + 1).clamp(max=places.shape[1])
        return tokens, places, instructions, rows[None, len(number) - read :].contiguous()

    def feature_rows(self, tokens: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return the rows of training, all of which are read."""
        wanted = PredictionTargets(
            arrangement, arrangement.num_positions - 1, slice(0, arrangement.num_positions)
        )
        *rows, _ = self.rows(tokens, wanted)
        every = torch.arange(2 * arrangement.num_positions, device=tokens.device)
        return *rows, every[None]

    def shape_of(self, rows: AskedRows) -> tuple[int, int]:
        """Return the number of images, and of rows that the head reads."""
        return rows[0].shape[0], rows[3].shape[1]

    def embed(self, parts: Parts, rows: AskedRows, known: Mapping[Role, Tensor]) -> Embedded:
        """See `Asking`; an instruction is a learned vector in which its place is encoded."""
        tokens, places, instructions, read = rows
        starts = places.shape[1] > tokens.shape[1]
        content = parts.embed_content(tokens)
        content = parts.add_positions(content, places[:, starts:], "positions")
        if starts:
            content = parts.prepend_start(content, known)
        vectors = parts.vector("query", content).expand(*instructions.shape, -1)
        queries = parts.encoded_places(vectors, instructions).to(content.dtype)
        hidden = _interleaved(content, queries.expand(len(content), -1, -1))
        cells = _interleaved(places, instructions)
        return Embedded(hidden, cells, {READ_ROWS: read}, cells[:, read[0]])

    def workload(self, arrangement: Arrangement, num_outputs: int) -> Workload:
        """Return the workload of one causal stream, half of which the head reads."""
        rows = 2 * arrangement.num_positions
        visible = (rows + 1) / 2
        return Workload(rows, rows, visible, arrangement.num_positions, num_outputs, num_last=rows)


def _interleaved(content: Tensor, queries: Tensor) -> Tensor:
    """Interleave `[b, c, ...]` and `[b, i, ...]`; the rest of the second follows."""
    count = content.shape[1]
    pairs = torch.stack([content, queries[:, :count]], dim=2).flatten(1, 2)
    return torch.cat([pairs, queries[:, count:]], dim=1)
