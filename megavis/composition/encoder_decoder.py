"""Encoder-decoders, such as MAE's: the encoder sees only known tokens, the decoder all.

`Visible` is the asking kind of the encoder. `SecondStack` is the decoder; the bridge to it adds
mask tokens for the positions that the encoder did not see.

Legend: b images, n positions, w width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.asking import AskedRows, Asking, Embedded
from megavis.config.section import PositionKind
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions
from megavis.model.flops import Workload
from megavis.model.parameters import filled, normal
from megavis.model.stack import Bridge, LayerPlan, block_plans
from megavis.model.visibility import VisibilityKind
from megavis.schedules.schedule import Arrangement, Question

if TYPE_CHECKING:
    from megavis.composition.reader import Reader, Role

ORDER = "order"
"""Name under which the places of all positions, int64 `[b, n]`, are carried to the bridge."""


class Visible(Asking):
    """One row per known token, in the arrangement's order."""

    num_inputs = 2
    visibility: VisibilityKind = "full"
    extra_tensors = (ORDER,)

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


class SecondStack:
    """A decoder with full attention and without stochastic depth.

    Args:
        sizes: values of `model` keys that differ from the encoder's.
    """

    def __init__(
        self,
        below: Core,
        asks: Visible,
        sizes: Mapping[str, int],
        *,
        grid: tuple[int, int],
        positions: PositionKind,
    ) -> None:
        model = below.model.model_copy(update={**sizes, "ffn_hidden_size": None})
        self.core = below.with_stack(name="decoder", model=model, carried_names=(), drop_path=0.0)
        self.below, self.num_front, self.grid = below, asks.num_front, grid
        self.positions = positions

    def layers(self, num_outputs: int, *, seed: int) -> list[LayerPlan]:
        """Return bridge and blocks, below a head with `num_outputs` outputs per token."""
        rows, depth = self.num_front + self.grid[0] * self.grid[1], self.below.model.num_layers + 1
        work = Workload.of_one_stream(rows, num_outputs, causal=False)
        build = partial(
            MaskTokens,
            self.below,
            self.core,
            num_front=self.num_front,
            grid=self.grid,
            positions=self.positions,
        )
        bridge = LayerPlan("bridge", build, seed, depth, gives_features=True)
        return [bridge, *block_plans(self.core, work, seed=seed, depth=depth + 1)]


class MaskTokens(Bridge):
    """Bridge from encoder to decoder: append mask tokens, and add positions to all tokens."""

    def __init__(
        self,
        below: Core,
        above: Core,
        *,
        num_front: int,
        grid: tuple[int, int],
        positions: PositionKind,
    ) -> None:
        super().__init__(below, above)
        fill, self.num_front = normal(0.02), num_front
        self.mask = filled(above.model.hidden_size, fill=fill)
        self.positions = grid_positions(above, positions, grid, fill=fill)

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return front rows, visible tokens and mask tokens, `[b, num_front + n, w]`."""
        order, front = carried[ORDER], hidden[:, : self.num_front]
        visible = hidden[:, self.num_front :]
        num_hidden = order.shape[1] - visible.shape[1]
        masks = self.mask.to(hidden.dtype).expand(len(hidden), num_hidden, -1)
        patches = self.positions(torch.cat([visible, masks], dim=1), order)
        return torch.cat([front, patches], dim=1), {}
