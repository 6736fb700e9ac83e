"""The first layer of DARL: a start token, patches, and in two streams queries (section 3.1, A.5).

Legend: b images, s tokens, q queries, d numbers of a patch, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.init import filled, normal
from megavis.model.patches import PatchEmbedding
from megavis.model.positions import cell_coordinates
from megavis.model.stream import State, Stream, as_bits

START = -1
"""The place of the start token. It stands at row 0, column -1: left of the first patch."""

DARLInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""What the first layer takes.

Tokens `[b, s, d]`, their places int64 `[b, s]` in raster order (`START` is the start token, whose
numbers are of no meaning), places int64 `[b, q]` that queries ask for (q is 0 in one stream), and
noisy patches with γ behind each `[b, places that are predicted, d + 1]` (none without diffusion).
"""


class SequenceEmbedding(nn.Module):
    """Embeds patches and tells where they stand.

    A query asks for the patch that would come after the tokens that it sees: the last of q queries
    sees all s tokens, the one before all but the last, and so on.
    """

    def __init__(
        self, core: Core, patch_width: int, *, side: int, positions: PositionKind, queries: bool
    ) -> None:
        """Build.

        Args:
            core: sizes and groups.
            patch_width: d.
            side: of the square grid of patches.
            positions: how tokens know where they stand.
            queries: two streams.
        """
        super().__init__()
        width = core.megatron.hidden_size
        self.core, self.side = core, side
        self.patches = PatchEmbedding(patch_width, width)
        self.positions = grid_positions(core, positions, (side, side), fill=normal(0.02))
        self.start = filled(width, fill=normal(0.02))
        self.query = filled(width, fill=normal(0.02)) if queries else None

    def forward(self, inputs: DARLInputs) -> State:
        """Embed; the state's tokens are those of the content, then the queries."""
        patches, places, asked, noisy = inputs
        cells = cell_coordinates(places.clamp(min=0), self.side)
        starts = places == START
        hidden = self.positions(self.patches(patches), cells)
        hidden = torch.where(starts[..., None], self.start.to(hidden.dtype), hidden)
        # The start token's clamped cell is row 0, column 0: one to the left of it.
        coordinates = torch.stack([cells[..., 0], cells[..., 1] - starts.long()], dim=-1)
        if asked.shape[1]:
            assert self.query is not None
            query = self.query.to(hidden.dtype).expand(*asked.shape, -1)
            asked_cells = cell_coordinates(asked, self.side)
            hidden = torch.cat([hidden, self.positions(query, asked_cells)], dim=1)
            coordinates = torch.cat([coordinates, asked_cells], dim=1)
        carried = {**self._groups(places, asked), **self.positions.carried(coordinates)}
        if noisy.shape[1]:
            carried["noisy"] = as_bits(noisy)
        return Stream(to_stream(hidden, self.core), carried).pack()

    def _groups(self, places: Tensor, asked: Tensor) -> dict[str, Tensor]:
        """Return who sees whom in two streams: each token is a group of its own."""
        if self.query is None:
            return {}
        count, num_asked = places.shape[1], asked.shape[1]
        numbers = torch.arange(count + 1, device=places.device).expand(len(places), -1)
        return {
            "content_groups": numbers[:, :count].contiguous(),
            "query_groups": numbers[:, count + 1 - num_asked :].contiguous(),
        }
