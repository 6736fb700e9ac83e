"""The first layer of iGPT: palette ids, positions, and what stands for what is not seen.

Legend: b images, n tokens, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions, to_stream, token_embedding
from megavis.model.init import filled, normal
from megavis.model.positions import cell_coordinates
from megavis.model.stream import State, Stream
from megavis.objectives.igpt_config import IGPTConfig

NOTHING = -1
"""Stands where an id would be, before the first pixel."""


class PixelEmbedding(nn.Module):
    """Token and position embeddings, with the start vector or the BERT mask."""

    def __init__(self, core: Core, config: IGPTConfig, positions: PositionKind) -> None:
        super().__init__()
        width, side = core.megatron.hidden_size, core.config.data.image_size
        self.core, self.side = core, side
        self.tokens = token_embedding(core, config.vocabulary_size, normal(0.02))
        self.positions = grid_positions(core, positions, (side, side), fill=normal(0.01))
        self.start: nn.Parameter | None = None
        if config.mode == "autoregressive":
            self.start = filled(width, fill=normal(0.02))

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed.

        Args:
            inputs: for each place the id that it sees, int64 `[b, n]`: that of the place before,
                or `NOTHING`, for which the start vector stands; for BERT its own. Then the
                pixel, int64 `[1, n]`, that each place predicts; for BERT also the mask, bool
                `[b, n]`.

        Returns:
            `[n, b, h]`, and for rotary positions the coordinates.
        """
        ids, pixels, *masks = inputs
        content = self.tokens(ids.clamp(min=0))
        if self.start is not None:
            nothing = (ids == NOTHING)[:, :, None]
            content = torch.where(nothing, self.start.to(content.dtype), content)
        for mask in masks:
            content = content.masked_fill(mask[:, :, None], 0.0)
        coordinates = cell_coordinates(pixels, self.side)
        hidden = self.positions(content, coordinates)
        return Stream(to_stream(hidden, self.core), self.positions.carried(coordinates)).pack()
