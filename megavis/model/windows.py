"""Attention within windows of the grid, and positions relative to a query in it.

"Exploring Plain Vision Transformer Backbones for Object Detection" (Li et al., 2022), section 3 and
its released code: most blocks attend within windows that do not overlap, a few to the whole image.
To its block, a window is one more image of the batch, so blocks need no code for windows.

Legend: b images, H × W the grid, w side of a window, k windows of an image, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megavis.model.core import Block
from megavis.model.dropout import SAMPLES
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import filled, set_decay, set_start, zeros
from megavis.parallel.device import DeviceConstant

COORDINATES = "coordinates"
"""Name under which the coordinates of rows, int64 `[b or 1, s, axes]`, are carried to blocks."""


@dataclass(frozen=True)
class Windows:
    """Square windows of `side` cells that cover a grid of rows and columns."""

    grid: tuple[int, int]
    side: int

    def fold(self, cells: Tensor) -> Tensor:
        """Map cells in raster order `[H W, b, ...]` to windows `[w², b k, ...]`."""
        down, across = (length // self.side for length in self.grid)
        cells = cells.unflatten(0, (down, self.side, across, self.side))
        return cells.movedim((1, 3, 4), (0, 1, 2)).flatten(2, 4).flatten(0, 1)

    def unfold(self, windows: Tensor) -> Tensor:
        """Invert `fold`."""
        down, across = (length // self.side for length in self.grid)
        cells = windows.unflatten(1, (-1, down, across)).unflatten(0, (self.side, self.side))
        return cells.movedim((3, 0, 4, 1, 2), (0, 1, 2, 3, 4)).flatten(0, 3)

    def fold_state(self, state: LayerState) -> LayerState:
        """Fold hidden states, coordinates and sample indices; a window has those of its image."""
        carried = dict(state.carried)
        hidden = self.fold(state.hidden)
        count = hidden.shape[1] // state.hidden.shape[1]
        if COORDINATES in carried:
            places = carried[COORDINATES].expand(state.hidden.shape[1], -1, -1)
            carried[COORDINATES] = self.fold(places.transpose(0, 1)).transpose(0, 1)
        if SAMPLES in carried:
            carried[SAMPLES] = carried[SAMPLES].repeat_interleave(count)
        return LayerState(hidden, carried)


class QueryPositions(nn.Module):
    """Bias of attention scores: the query's products with the key's relative row and column.

    "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection" (Li et al.,
    2022), equation 4, as in ViTDet's code: the same vectors for all heads, `rows` float32
    `[2H - 1, d]` and `columns` `[2W - 1, d]`, initially zero. Unlike other tables they have weight
    decay: detectron2's recipe of ViTDet-B excludes only `pos_embed`.
    """

    def __init__(self, grid: tuple[int, int], head_size: int) -> None:
        super().__init__()
        self.grid = grid
        self.rows, self.columns = (filled(2 * side - 1, head_size, fill=zeros) for side in grid)
        for table in (self.rows, self.columns):
            set_decay(table, "always")
        # Pretrained runs lack these tables, but another detection run may have them.
        set_start(self.parameters(), "saved or fresh")

    def forward(self, query: Tensor) -> Tensor:
        """Return the bias of scores `[b, n, H W, H W]` of queries `[b, n, H W, d]`."""
        height, width = self.grid
        cells = query.unflatten(2, self.grid)
        rows = self.rows[_offsets(height, query.device)].to(query.dtype)
        columns = self.columns[_offsets(width, query.device)].to(query.dtype)
        by_rows = torch.einsum("bnhwd,hkd->bnhwk", cells, rows)
        by_columns = torch.einsum("bnhwd,wkd->bnhwk", cells, columns)
        bias = by_rows[..., :, None] + by_columns[..., None, :]
        return bias.flatten(4, 5).flatten(2, 3)


def _offsets(length: int, device: torch.device) -> Tensor:
    """Return the index of the vector for each query and key of an axis, `[length, length]`."""
    places = torch.arange(length, device=device)
    return places[:, None] - places + length - 1


def on_grid(
    factory: Callable[[], nn.Module], names: tuple[str, ...], order: Tensor
) -> Callable[[], nn.Module]:
    """Return a factory of the same first layer that returns only patches, in raster order.

    Rows in front of them, such as a class token, are dropped, as in ViTDet. Uses hooks rather than
    a wrapper module, so that parameters keep their names.

    Args:
        names: names of the carried tensors.
        order: int64 `[1, n]`, the patch, in raster order, of each of the last n rows.
    """
    rows = DeviceConstant(order[0].argsort())

    def arrange(_: nn.Module, __: Any, packed: PackedState) -> PackedState:
        state, own = LayerState.unpack(packed, names), rows.on(_first(packed).device)
        carried = dict(state.carried)
        if COORDINATES in carried:
            carried[COORDINATES] = carried[COORDINATES][:, -len(own) :][:, own]
        return LayerState(state.hidden[-len(own) :][own], carried).pack()

    def build() -> nn.Module:
        layer = factory()
        layer.register_forward_hook(arrange)
        return layer

    return build


def _first(packed: PackedState) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[0]


def in_windows(
    factory: Callable[[], nn.Module],
    windows: Windows | None,
    positions: Callable[[], nn.Module] | None,
) -> Callable[[], nn.Module]:
    """Return a factory of the same block that attends within windows, if given.

    Args:
        positions: builds `QueryPositions` of the block's attention, if given.
    """
    waiting: list[LayerState] = []

    def enter(block: nn.Module, arguments: tuple[PackedState, ...]) -> tuple[Any, ...]:
        assert windows is not None
        state = LayerState.unpack(arguments[0], cast(Block, block).core.carried_names)
        waiting.append(state)
        return (windows.fold_state(state).pack(), *arguments[1:])

    def leave(_: nn.Module, __: Any, packed: PackedState) -> PackedState:
        assert windows is not None
        return waiting.pop().with_hidden(windows.unfold(_first(packed))).pack()

    def build() -> nn.Module:
        block = factory()
        if positions is not None:
            cast(Block, block).self_attention.query_positions = positions()
        if windows is not None:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
        return block

    return build
