"""The first layer of GVP: content and query tokens, and who sees whom (section 4.1).

Legend: b images, S condition tokens, c content tokens of the image, q query tokens, d numbers of a
patch, e numbers of a given condition, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.init import filled, normal
from megavis.model.patches import WholeLinear
from megavis.model.positions import cell_coordinates
from megavis.model.stream import State, Stream

TwoStreams = tuple[Tensor, ...]
"""What the first layer takes.

Content `[b, c, d]`, its places int64 `[b, c]` in raster order, its groups int64 `[b, c]`; the
places int64 `[b, q]` that are asked for, and their groups int64 `[b, q]`. No queries (q = 0) leave
the content stream alone. Where y_extra is no learned vector, it comes last: `[b, e]`.
"""


class TwoStreamEmbedding(nn.Module):
    """The start of both streams: H⁽⁰⁾ = [y; x] + E_pos and G⁽⁰⁾ = w + E_pos.

    The paper writes G⁽⁰⁾ = w without positions. Then all tokens of a group would get one and the
    same prediction, and requirement (1) of section 4.1 wants g(x_{z<t}, z_t), which knows z_t.
    """

    def __init__(
        self,
        core: Core,
        content: nn.Module,
        *,
        side: int,
        condition: int,
        positions: PositionKind,
        condition_size: int | None = None,
    ) -> None:
        """Build.

        Args:
            core: sizes and groups.
            content: embeds content, `[b, c, ...]` to `[b, c, h]`.
            side: of the square grid of tokens.
            condition: S, learned vectors that stand for y_extra; the first is the class token.
            positions: E_pos; condition tokens have no place.
            condition_size: e, where y_extra is given: one vector that is embedded by a linear map.
        """
        super().__init__()
        width = core.megatron.hidden_size
        self.core, self.side, self.linear_content = core, side, content
        self.positions = grid_positions(core, positions, (side, side), fill=normal(0.02))
        self.query = filled(width, fill=normal(0.02))
        self.condition: nn.Parameter | None = None
        self.linear_condition: nn.Module | None = None
        if condition_size is not None:
            self.linear_condition = WholeLinear(condition_size, width)
        elif condition:
            self.condition = filled(condition, width, fill=normal(0.02))

    def forward(self, inputs: TwoStreams) -> State:
        """Embed; the state's tokens are condition, content, queries, and groups are carried."""
        content, places, groups, query_places, query_groups, *given = inputs
        hidden = self.linear_content(content)
        parts = [self.positions(hidden, cell_coordinates(places, self.side))]
        if query_places.shape[1]:
            query = self.query.to(hidden.dtype).expand(*query_places.shape, -1)
            parts.append(self.positions(query, cell_coordinates(query_places, self.side)))
        extra = 0
        condition = self._condition(hidden, given)
        if condition is not None:
            extra = condition.shape[1]
            parts.insert(0, condition)
        carried = {
            # y_extra stands in G_0, which all tokens see.
            "content_groups": nn.functional.pad(groups, (extra, 0)).contiguous(),
            "query_groups": query_groups.contiguous(),
            **self._carried_positions(torch.cat([places, query_places], dim=1), extra),
        }
        return Stream(to_stream(torch.cat(parts, dim=1), self.core), carried).pack()

    def _condition(self, hidden: Tensor, given: list[Tensor]) -> Tensor | None:
        """Return y `[b, S, h]`, like `hidden` in number and type; None where S is 0."""
        if self.linear_condition is not None:
            return self.linear_condition(given[0])[:, None].to(hidden.dtype)
        if self.condition is None:
            return None
        return self.condition.to(hidden.dtype).expand(len(hidden), -1, -1)

    def _carried_positions(self, places: Tensor, extra: int) -> dict[str, Tensor]:
        """Return what rotary kinds carry; they do not turn condition tokens (row and column 0)."""
        coordinates = cell_coordinates(places, self.side)
        return self.positions.carried(nn.functional.pad(coordinates, (0, 0, extra, 0)))


def two_streams(
    content: Tensor, seen: Tensor, groups: Tensor, asked: Tensor, asked_groups: Tensor
) -> TwoStreams:
    """Return what the first layer takes.

    Args:
        content: tokens `[b, c, ...]`.
        seen: places int64 `[b, c]` of the content.
        groups: of the content, int64 `[b, c]`.
        asked: places int64 `[b, q]` of the queries.
        asked_groups: of the queries, int64 `[b, q]`. Those of G_0 see what G_1 sees, by equation
            (11); nothing is learned from them.
    """
    return content, seen, groups, asked, asked_groups.clamp(min=1)


def content_alone(content: Tensor, seen: Tensor, groups: Tensor) -> TwoStreams:
    """Return what the first layer takes, without queries."""
    return two_streams(content, seen, groups, seen[:, :0], groups[:, :0])


def raster(images: Tensor, num_tokens: int) -> Tensor:
    """Return the order 0, 1, ..., T - 1 for each of `images` `[b, ...]`: int64 `[b, T]`."""
    places = torch.arange(num_tokens, device=images.device)
    return places.expand(len(images), -1)
