"""Position encodings of tokens on a grid.

Places are tensors: int64 `[b or 1, s]` holds the cell of each token in raster order, so a permuted
sequence is the same tokens with permuted places. Absolute kinds are added to the embedding, rotary
kinds rotate queries and keys by row and column, and relative ones are added to attention scores.

Sources: sin-cos, "Attention Is All You Need" (section 3.5), in two dimensions as in MAE's released
code; rotary, "RoFormer"; decomposed rotary, "Denoising Autoregressive Representation Learning",
section 3.4 and appendix D; relative bias, "BEiT: BERT Pre-Training of Image Transformers", section
2.5 and its released code.

Legend: b images, s tokens, h hidden size, n heads of this process, d head size, q queries, c keys,
H × W the grid.
"""

from __future__ import annotations

import math

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megavis.config.section import PositionKind
from megavis.model.kernels import apply_rotary
from megavis.model.parameters import Fill, filled, set_start, zeros

LEARNED = "embedding.positions.weight"
"""Parameter name of learned positions in every paper's model."""

START = -1
"""Place of a start token: one column to the left of the first cell."""

NOWHERE = -2
"""Place of a token off the grid, such as a class token."""

UNTURNED = -(2**31)
"""Coordinate of a token whose queries and keys are zeroed in place of a rotation."""

PLACES = "places"
"""Name under which the places of all rows, int64 `[b or 1, m]`, are carried to a head."""

OFF_GRID = -1
"""Row and column of a token off the grid, such as a class token."""

_WAVELENGTH = 10_000.0


class Positions(nn.Module):
    """Encodes positions of tokens on a grid of `height` × `width`.

    Only learned positions have a `weight`, one vector per cell in raster order; positions of
    `learned_sincos` start as sin-cos.

    Args:
        scale: multiplies the coordinates of sin-cos positions, and of rotary ones in `encode`; see
            `interpolation`.
        head_size: width of an attention head, for `encode`.
        zeroes_start: whether rotary kinds zero the queries and keys of a start token.
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
        head_size: int | None = None,
        zeroes_start: bool = False,
    ) -> None:
        super().__init__()
        self.zeroes_start = zeroes_start
        self.kind, self.width, self.hidden_size, self.scale = kind, width, hidden_size, scale
        self.head_size = hidden_size if head_size is None else head_size
        # Frames of a spectrogram.
        self.is_row = height == 1
        self.weight: nn.Parameter | None = None
        if kind in ("learned", "learned_sincos"):
            start = fill if kind == "learned" else self._fill_sincos
            self.weight = filled(height * width, hidden_size, fill=start)
            # A run without positions may be fine-tuned with some.
            set_start([self.weight], "saved or fresh")

    def _fill_sincos(self, table: Tensor) -> None:
        with torch.no_grad():
            cells = torch.arange(len(table), device=table.device)
            table.copy_(self._sincos(cells))

    def _sincos(self, cells: Tensor) -> Tensor:
        coordinates = cell_coordinates(cells, self.width)
        # A single row has one axis, like the sequences of "Attention Is All You Need".
        coordinates = coordinates[..., 1:] if self.is_row else coordinates
        return sincos(self.scale * coordinates, self.hidden_size)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Add absolute positions of cells `[b or 1, s]` to `[b, s, h]`; other kinds add none."""
        if self.weight is not None:
            return hidden + nn.functional.embedding(places, self.weight)
        if self.kind == "sincos":
            return hidden + self._sincos(places).to(hidden.dtype)
        return hidden

    def encode(self, vectors: Tensor, places: Tensor) -> Tensor:
        """Encode cells `[b or 1, s]` in vectors `[b or 1, s, h]`.

        Absolute positions are added. Rotary ones rotate the vector as they rotate queries and keys:
        "RandAR: Decoder-only Autoregressive Visual Generation in Random Orders", section 3.2, and
        its released code.
        """
        coordinates = self.carried(places).get("coordinates")
        if coordinates is None:
            return self(vectors, places)
        rotations = turns(coordinates, self.head_size, scale=self.scale)
        heads = vectors.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return apply_rotary(heads, *rotations).transpose(1, 2).flatten(2)

    def carried(self, places: Tensor) -> dict[str, Tensor]:
        """Return the coordinates that rotary and relative kinds carry to the blocks, by name.

        For cells int64 `[b or 1, s]`, `START` or `NOWHERE`: int64 `[b or 1, s, axes]`, the index in
        raster order for `rope_1d`, row and column for the others. Empty for absolute kinds.
        """
        names = carried_names(self.kind)
        if not names:
            return {}
        coordinates = place_coordinates(places, self.width)
        if self.kind == "rope_1d":
            coordinates = coordinates[..., :1] * self.width + coordinates[..., 1:]
        if self.zeroes_start:
            coordinates = coordinates.masked_fill((places == START)[..., None], UNTURNED)
        return dict.fromkeys(names, coordinates.contiguous())


class RelativeBias(nn.Module):
    """A learned bias of attention scores for each head and relative position of key and query.

    `weight` is float32 `[n, (2H - 1)(2W - 1) + 3]`, initially zero: one value for each offset in
    rows and columns, then one for a query off the grid, one for a key off the grid, and one for
    both. It is split over the tensor group by heads.
    """

    def __init__(self, num_heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.height, self.width = grid
        self.num_offsets = (2 * self.height - 1) * (2 * self.width - 1)
        self.weight = filled(num_heads, self.num_offsets + 3, fill=zeros)
        set_start([self.weight], "saved or fresh")
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, queries: Tensor, keys: Tensor, heads: slice = slice(None)) -> Tensor:
        """Return the bias `[b or 1, n, q, c]` of all heads, or of some.

        Queries and keys are rows and columns, or `OFF_GRID`, int64 `[b or 1, q or c, 2]`.
        """
        rows, columns = (keys[:, None] - queries[:, :, None]).unbind(-1)
        entries = (rows + self.height - 1) * (2 * self.width - 1) + columns + self.width - 1
        outside = queries[:, :, None, 0].eq(OFF_GRID) + 2 * keys[:, None, :, 0].eq(OFF_GRID).long()
        entries = torch.where(outside > 0, self.num_offsets - 1 + outside, entries)
        return self.weight[heads][:, entries].transpose(0, 1)


def cell_coordinates(cells: Tensor, width: int) -> Tensor:
    """Return row and column, int64 `[..., 2]`, of cells int64 `[...]` on a grid of this width."""
    return torch.stack([cells // width, cells % width], dim=-1)


def place_coordinates(places: Tensor, width: int) -> Tensor:
    """Return row and column, int64 `[..., 2]`, of places, including `START` and `NOWHERE`."""
    cells = cell_coordinates(places.clamp(min=0), width)
    # The start token's clamped cell is in row 0 and column 0.
    cells = torch.stack([cells[..., 0], cells[..., 1] - (places == START).long()], dim=-1)
    return torch.where(places[..., None] == NOWHERE, OFF_GRID, cells)


def is_grid(num_cells: int) -> bool:
    """Return True if `num_cells` is a square number."""
    return math.isqrt(num_cells) ** 2 == num_cells


def resize_table(table: Tensor, num_cells: int) -> Tensor:
    """Interpolate learned positions `[cells, h]` from one square grid to another, bicubically.

    Returns:
        `[num_cells, h]`; the table itself if the size is the same.

    Raises:
        ValueError: either grid is not square.
    """
    sides = [math.isqrt(count) for count in (len(table), num_cells)]
    if not (is_grid(len(table)) and is_grid(num_cells)):
        raise ValueError(f"{len(table)} and {num_cells} cells are not both square grids")
    if sides[0] == sides[1]:
        return table
    planes = table.t().unflatten(1, (sides[0], sides[0]))[None]
    # Without aligned corners, as in MAE's `interpolate_pos_embed`.
    resized = nn.functional.interpolate(planes, size=(sides[1], sides[1]), mode="bicubic")
    return resized[0].flatten(1).t().contiguous()


def carried_names(kind: PositionKind) -> tuple[str, ...]:
    """Return the names of the tensors in `Positions.carried` for a kind."""
    return ("coordinates",) if kind in ("rope_1d", "rope_2d", "relative_2d") else ()


def sincos(coordinates: Tensor, hidden_size: int) -> Tensor:
    """Return sine and cosine features of coordinates `[..., axes]`: float32 `[..., h]`.

    Sines then cosines of each axis, beginning with the last axis (the column), as in MAE's
    `get_2d_sincos_pos_embed`. Raises ValueError unless h is a multiple of 2 · axes.
    """
    axes = coordinates.shape[-1]
    if hidden_size % (2 * axes):
        raise ValueError(f"sin-cos positions of {axes} axes need a width divisible by {2 * axes}")
    # In float64, in which NumPy computes MAE's table.
    places = coordinates.flip(-1)[..., None].double()
    angles = places * _frequencies(hidden_size // axes, coordinates, torch.float64)
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return waves.flatten(-2).float()


def turns(coordinates: Tensor, head_size: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles by which `apply_rotary` rotates queries and keys.

    Adjacent channels (2i, 2i + 1) form a complex number, rotated by coordinate · θ_i with
    θ_i = 10000^(-2i/d); the channels of a head are divided evenly between the axes (appendix D).
    Section 3.4 has 2π · coordinate · θ instead, which is `scale` 2π. Appendix D prints
    θ_i = max_wavelength^(2i/d) without a value; this is its inverse, with RoFormer's 10000.

    Args:
        coordinates: `[b or 1, s, axes]`.
        scale: multiplies coordinates; see `interpolation`.

    Returns:
        Cosines and sines, float32 `[b or 1, 1, s, d / 2]` each; zeros at `UNTURNED`.
    """
    frequencies = scale * _frequencies(head_size // coordinates.shape[-1], coordinates)
    angles = (coordinates[..., None].float() * frequencies).flatten(-2)[:, None]
    turned = (coordinates[..., :1] != UNTURNED)[:, None]
    return angles.cos() * turned, angles.sin() * turned


def _frequencies(width: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return θ_i for i in 0 .. width / 2 - 1: `[width / 2]` of `dtype`."""
    steps = torch.arange(0, width, 2, device=like.device, dtype=dtype)
    return _WAVELENGTH ** (-steps / width)
