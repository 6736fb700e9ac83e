"""MAE: Masked Autoencoders Are Scalable Vision Learners (He et al., 2021).

An encoder sees a random quarter of the patches; a narrower decoder sees what it gives, and mask
tokens at the places of the others, whose pixels it predicts (section 3). Nothing is unshuffled:
tokens know their places, and blocks in which all see all do not ask in which order they stand.

Legend: b images, n patches, c of them visible, d numbers of a patch, w width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from megavis.composition.tokens import Patches
from megavis.composition.visible import ORDER, Visible
from megavis.densities.squared_error import SquaredError
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions
from megavis.model.flops import Workload
from megavis.model.init import filled, normal
from megavis.model.parts import Bridge, block_plans, bridge_plan
from megavis.model.patches import TokenHead
from megavis.model.positions import cell_coordinates
from megavis.model.stack import LayerPlan
from megavis.objectives.composition import Composition
from megavis.objectives.mae_config import MAEConfig
from megavis.schedules.context import Context


class MaskTokens(Bridge):
    """From encoder to decoder: mask tokens join the visible ones, and all learn their places."""

    def __init__(self, below: Core, above: Core, paper: MAE) -> None:
        super().__init__(below, above)
        fill, self.num_front = normal(0.02), paper.asks.num_front
        self.num_columns = paper.reads.grid[1]
        self.mask = filled(above.model.hidden_size, fill=fill)
        grid = paper.reads.grid
        self.positions = grid_positions(above, paper.position_kind, grid, fill=fill)

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return class token, visible and hidden patches `[b, 1 + n, w]`."""
        order, front = carried[ORDER], hidden[:, : self.num_front]
        visible = hidden[:, self.num_front :]
        num_hidden = order.shape[1] - visible.shape[1]
        masks = self.mask.to(hidden.dtype).expand(len(hidden), num_hidden, -1)
        cells = cell_coordinates(order, self.num_columns)
        patches = self.positions(torch.cat([visible, masks], dim=1), cells)
        return torch.cat([front, patches], dim=1), {}


class MAE(Composition):
    """Predict the hidden patches from the visible ones."""

    config_type = MAEConfig
    paper: MAEConfig
    default_positions = "sincos"
    part_names = {"content": "patches", "positions": "positions", "front": "class_token"}

    @cached_property
    def reads(self) -> Patches:
        """Patches of pixels."""
        return self.patches()

    @property
    def num_tokens(self) -> int:
        """Patches and the class token."""
        return self.reads.num_tokens + self.paper.class_token

    @cached_property
    def schedule(self) -> Context:
        """A random share of the patches is visible; the others are predicted."""
        return Context(
            self.reads.num_tokens,
            mask_ratio=self.paper.mask_ratio,
            asks_context=False,
            seed=self.config.seed,
        )

    @cached_property
    def asks(self) -> Visible:
        """In the decoder: the encoder holds the class token and the visible patches."""
        return Visible(num_front=int(self.paper.class_token))

    @cached_property
    def density(self) -> SquaredError:
        """Pixels by squared error, read off the rows of the hidden patches."""
        width = self.reads.width
        skipped = self.asks.num_front + self.paper.num_visible(self.config)
        return SquaredError(
            width,
            normalize=self.paper.normalize_targets,
            build_head=lambda: TokenHead(self.decoder, width, num_skipped=skipped),
        )

    @cached_property
    def decoder(self) -> Core:
        """The second stack, without stochastic depth."""
        size = {**self.paper.decoder.model_dump(), "ffn_hidden_size": None}
        model = self.core.model.model_copy(update=size)
        return self.core.with_stack(name="decoder", model=model, carries=(), drop_path=0.0)

    def workload(self) -> Workload:
        """Return that of the encoder, with the bridge as the map above it."""
        rows = self.asks.num_front + self.paper.num_visible(self.config)
        return Workload.of_one_stream(rows, self.decoder.model.hidden_size, causal=False)

    def upper_layers(self) -> list[LayerPlan]:
        """Return bridge and decoder."""
        seed, depth = self.config.seed, self.core.model.num_layers + 1
        work = Workload.of_one_stream(self.num_tokens, self.reads.width, causal=False)
        bridge = bridge_plan(
            "bridge", lambda: MaskTokens(self.core, self.decoder, self), seed=seed, depth=depth
        )
        return [bridge, *block_plans(self.decoder, work, seed=seed, depth=depth + 1)]
