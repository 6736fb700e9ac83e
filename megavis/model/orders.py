"""Generation orders of the cells of a grid.

"Denoising Autoregressive Representation Learning", section 4.4 and appendix C. An order is data:
int64 `[n]`, for each place of the sequence the cell that is there, cells numbered in raster
order.

Legend: n cells, `height` · `width` of them; k side of a square block in cells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megavis.config.choices import OrderKind
from megavis.parallel.random import uniform


def fixed_order(kind: OrderKind, *, height: int, width: int, block: int = 1) -> Tensor:
    """Return the order that all images share.

    Args:
        kind: `raster`: row by row. `nested_raster`: blocks in raster order, each block's cells in
            raster order before the next block's. `round_robin`: the first cell of each block, in
            raster order of the blocks, then the second cell of each, and so on.
        height: rows of the grid.
        width: columns of the grid.
        block: k; of no meaning to `raster`.

    Returns:
        int64 `[n]`.

    Raises:
        ValueError: k does not divide both sides, or the kind is drawn for each image.
    """
    cells = torch.arange(height * width)
    if kind == "raster":
        return cells
    if kind == "random":
        raise ValueError("a random order is drawn for each image: see random_orders")
    if height % block or width % block:
        raise ValueError(f"blocks of {block}² do not divide a grid of {height} × {width}")
    # Dimensions: row of blocks, row in the block, column of blocks, column in the block.
    blocks = cells.view(height // block, block, width // block, block)
    if kind == "nested_raster":
        return blocks.permute(0, 2, 1, 3).flatten()
    return blocks.permute(1, 3, 0, 2).flatten()


def random_orders(sample_index: Tensor, num_cells: int, *, seed: int) -> Tensor:
    """Draw an order for each image, a function of seed and sample alone.

    Args:
        sample_index: int64 `[b]`.
        num_cells: n.
        seed: the run's seed.

    Returns:
        int64 `[b, n]`, every permutation equally likely up to ties of 24-bit numbers.
    """
    draws = uniform(sample_index, num_cells, seed=seed, purpose="order")
    # Stable, so that a tie falls alike on every device.
    return draws.argsort(dim=1, stable=True)


def take_places(values: Tensor, order: Tensor) -> Tensor:
    """Take of `values` `[b, n, ...]` those at `order` `[m]` or `[b, m]`: `[b, m, ...]`."""
    index = order.expand(len(values), -1)
    index = index.reshape(*index.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def to_raster(ordered: Tensor, order: Tensor) -> Tensor:
    """Undo `take_places`."""
    return take_places(ordered, order.argsort(dim=-1))


class Constant:
    """A tensor that each device is sent once, so that no step waits for a copy from the host."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on this device."""
        if device not in self._copies:
            self._copies[device] = self._value.to(device)
        return self._copies[device]
