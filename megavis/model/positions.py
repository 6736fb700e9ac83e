"""Position encodings of tokens on a grid, in six kinds.

Places are data: int64 `[b, s]`, the number of a token's cell in raster order, b = 1 where all
images share them; a permuted sequence is the same tokens with permuted places. Absolute kinds are
added to the embedding, rotary kinds turn queries and keys by row and column, and relative ones add
to what attention weighs (`RelativeBias`).

Sources: sin-cos, "Attention Is All You Need" (section 3.5), in two dimensions as MAE's released
code has it; rotary, "RoFormer"; decomposed rotary, "Denoising Autoregressive Representation
Learning", section 3.4 and appendix D.

A learned attention bias for each offset between two cells of a grid.

"BEiT: BERT Pre-Training of Image Transformers" (section 2.5 and its released code): every layer and
head has its own, and all start at zero.

Legend: b images, n heads of this process, q queries, c keys, H × W the grid.
"""

from __future__ import annotations

import math

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.model.declarations import set_start
from megavis.model.init import Fill, filled, zeros

LEARNED = "embedding.positions.weight"
"""The name of learned positions in every paper's model."""

START = -1
"""The place of a start token: one column to the left of the first cell."""
NOWHERE = -2
"""The place of a token off the grid, such as a class token."""

_WAVELENGTH = 10_000.0


def cell_coordinates(cells: Tensor, width: int) -> Tensor:
    """Return row and column, int64 `[..., 2]`, of cells int64 `[...]` of rows of `width` cells."""
    return torch.stack([cells // width, cells % width], dim=-1)


def place_coordinates(places: Tensor, width: int) -> Tensor:
    """Return row and column, int64 `[..., 2]`, of places, some of them `START` or `NOWHERE`."""
    cells = cell_coordinates(places.clamp(min=0), width)
    # The start token's clamped cell is row 0, column 0.
    cells = torch.stack([cells[..., 0], cells[..., 1] - (places == START).long()], dim=-1)
    return torch.where(places[..., None] == NOWHERE, OFF_GRID, cells)


class Positions(nn.Module):
    """Encodes positions of tokens on a grid of `height` × `width`.

    `weight` exists for learned positions alone: one vector a cell, in raster order.
    """

    def __init__(
        self,
        kind: PositionKind,
        *,
        height: int,
        width: int,
        hidden_size: int,
        fill: Fill,
        scale: float = 1.0,
    ) -> None:
        """Build.

        Args:
            kind: which way.
            height: of the grid.
            width: of the grid.
            hidden_size: of what is added.
            fill: of learned positions.
            scale: multiplies coordinates of sines and cosines; trained size / present size
                interpolates them. Rotary ones are scaled in `turns`.
        """
        super().__init__()
        self.kind, self.width, self.hidden_size, self.scale = kind, width, hidden_size, scale
        self.is_row = height == 1
        self.weight: nn.Parameter | None = None
        if kind == "learned":
            self.weight = filled(height * width, hidden_size, fill=fill)
            set_start([self.weight], "saved or fresh")

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Add to `hidden` `[b, s, h]` what absolute kinds add.

        Args:
            hidden: embeddings of the tokens.
            places: int64 `[b or 1, s]`, the cell of each.
        """
        if self.weight is not None:
            return hidden + nn.functional.embedding(places, self.weight)
        if self.kind == "sincos":
            coordinates = cell_coordinates(places, self.width)
            # A row has one axis, as in the sequences of "Attention Is All You Need".
            coordinates = coordinates[..., 1:] if self.is_row else coordinates
            return hidden + sincos(self.scale * coordinates, self.hidden_size).to(hidden.dtype)
        return hidden

    def carried(self, places: Tensor) -> dict[str, Tensor]:
        """Return what rotary and relative kinds carry to the blocks, under the name they know.

        Args:
            places: int64 `[b or 1, s]`, the cell of each token, `START` or `NOWHERE`.

        Returns:
            Nothing for other kinds; else int64 `[b or 1, s, axes]`: `rope_1d` numbers the cells in
            raster order, the others take row and column as they are.
        """
        names = carried_names(self.kind)
        if not names:
            return {}
        coordinates = place_coordinates(places, self.width)
        if self.kind == "rope_1d":
            coordinates = coordinates[..., :1] * self.width + coordinates[..., 1:]
        return dict.fromkeys(names, coordinates.contiguous())


def is_grid(num_cells: int) -> bool:
    """True where so many cells make a square."""
    return math.isqrt(num_cells) ** 2 == num_cells


def resize_table(table: Tensor, num_cells: int) -> Tensor:
    """Interpolate learned positions of one square grid for another, bicubically.

    Args:
        table: float32 `[n, h]`, a cell each in raster order.
        num_cells: of the other grid.

    Returns:
        `[num_cells, h]`; the table itself where nothing changes.

    Raises:
        ValueError: either grid is not square.
    """
    sides = [math.isqrt(count) for count in (len(table), num_cells)]
    if not (is_grid(len(table)) and is_grid(num_cells)):
        raise ValueError(f"{len(table)} and {num_cells} cells are not both square grids")
    if sides[0] == sides[1]:
        return table
    planes = table.t().unflatten(1, (sides[0], sides[0]))[None]
    resized = nn.functional.interpolate(planes, size=(sides[1], sides[1]), mode="bicubic")
    return resized[0].flatten(1).t().contiguous()


def carried_names(kind: PositionKind) -> tuple[str, ...]:
    """Return the names of what `Positions.carried` gives for a kind."""
    return ("coordinates",) if kind in ("rope_1d", "rope_2d", "relative_2d") else ()


def sincos(coordinates: Tensor, hidden_size: int) -> Tensor:
    """Return sines and cosines of each coordinate.

    Args:
        coordinates: `[..., axes]`.
        hidden_size: width; must divide by 2 · axes.

    Returns:
        float32 `[..., hidden_size]`: for each axis its sines, then its cosines, the last axis (the
        column) first, as in MAE's `get_2d_sincos_pos_embed`.
    """
    axes = coordinates.shape[-1]
    if hidden_size % (2 * axes):
        raise ValueError(f"sin-cos positions of {axes} axes need a width that 2 · {axes} divides")
    places = coordinates.flip(-1)[..., None].double()
    angles = places * _frequencies(hidden_size // axes, coordinates, torch.float64)
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return waves.flatten(-2).float()


def turns(coordinates: Tensor, head_size: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles by which `kernels.turn` turns queries and keys.

    Neighbouring channels (2i, 2i + 1) are a complex number, turned by coordinate · θ_i with
    θ_i = 10000^(-2i/d); the channels of a head are shared out evenly over the axes (appendix D).

    Args:
        coordinates: `[b or 1, s, axes]`.
        head_size: d; must be divisible by 2 · axes.
        scale: multiplies coordinates; trained size / present size interpolates them.

    Returns:
        float32 `[b or 1, 1, s, d / 2]` each.
    """
    by = angles(coordinates, head_size, scale=scale)[:, None]
    return by.cos(), by.sin()


def angles(coordinates: Tensor, head_size: int, *, scale: float = 1.0) -> Tensor:
    """Return by how much each pair of channels is turned.

    Args:
        coordinates: `[..., axes]`.
        head_size: d.
        scale: see `turns`.

    Returns:
        float32 `[..., d / 2]`, radians.
    """
    frequencies = scale * _frequencies(head_size // coordinates.shape[-1], coordinates)
    return (coordinates[..., None].float() * frequencies).flatten(-2)


def _frequencies(width: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return θ_i for i in 0 .. width / 2 - 1: `[width / 2]` of `dtype`."""
    steps = torch.arange(0, width, 2, device=like.device, dtype=dtype)
    return _WAVELENGTH ** (-steps / width)


OFF_GRID = -1
"""Row and column of a token off the grid, such as a class token."""


class RelativeBias(nn.Module):
    """Added to q · k / √d, by head and by the relative position of key and query.

    `weight` is float32 `[n, (2H - 1)(2W - 1) + 3]`: a number for each offset in rows and columns,
    then one for a query off the grid, one for a key off the grid, and one where both are. It is
    split over the tensor group by heads.

    Args:
        num_heads: n.
        grid: H and W.
    """

    def __init__(self, num_heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.height, self.width = grid
        self.num_offsets = (2 * self.height - 1) * (2 * self.width - 1)
        self.weight = filled(num_heads, self.num_offsets + 3, fill=zeros)
        set_start([self.weight], "saved or fresh")
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias `[b or 1, n, q, c]`.

        Args:
            queries: int64 `[b or 1, q, 2]`, row and column of each, `OFF_GRID` where it has none.
            keys: likewise, `[b or 1, c, 2]`.
        """
        rows, columns = (keys[:, None] - queries[:, :, None]).unbind(-1)
        entries = (rows + self.height - 1) * (2 * self.width - 1) + columns + self.width - 1
        outside = queries[:, :, None, 0].eq(OFF_GRID) + 2 * keys[:, None, :, 0].eq(OFF_GRID).long()
        entries = torch.where(outside > 0, self.num_offsets - 1 + outside, entries)
        return self.weight[:, entries].transpose(0, 1)
