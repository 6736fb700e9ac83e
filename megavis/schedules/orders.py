"""Orders in which the tokens of an image are predicted: one for all images, or drawn for each.

An order is a tensor: int64 `[n]` holds the grid cell at each position of the sequence, with cells
numbered in raster order. The kinds are from "Denoising Autoregressive Representation Learning",
section 4.4 and appendix C.

Legend: b images, n = `height` · `width` cells, one per token; k side of a square block in cells.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.section import OrderKind
from megavis.parallel.device import DeviceConstant
from megavis.parallel.random import derive_seed, uniform


class Orders:
    """The token at each position: shared by all images, or drawn for each.

    Args:
        shared: int64 `[n]`, the order of all images; for features, if each image has its own.
        seed: seed of the orders drawn for each image; None if all images share one.
    """

    share = 1.0
    """Probability that an image has its own order, if there is a seed; the others share one."""

    def __init__(self, shared: Tensor, *, seed: int | None = None) -> None:
        self._shared, self._seed = DeviceConstant(shared), seed
        self.num_positions = len(shared)

    def with_share(self, share: float) -> Orders:
        """Return the same orders with another probability of drawn ones."""
        other = copy.copy(self)
        other.share = share
        return other

    @property
    def is_random(self) -> bool:
        """True if images have their own orders."""
        return self._seed is not None and self.share > 0

    def of(self, index: Tensor) -> Tensor:
        """Return the orders of samples int64 `[b]`: int64 `[b, n]`, or `[1, n]` without a seed."""
        if self._seed is None:
            return self.shared(index.device)
        # Draw for all images whatever the share, so that shapes and work are the same in all steps.
        drawn = random_orders(index, self.num_positions, seed=self._seed)
        if self.share >= 1:
            return drawn
        chosen = uniform(index, 1, seed=self._seed, purpose="order-is-drawn") < self.share
        return torch.where(chosen, drawn, self.shared(index.device))

    def shared(self, device: torch.device) -> Tensor:
        """Return the order that needs no draw: int64 `[1, n]`."""
        return self._shared.on(device)[None]


def order_of_run(
    order: str | Sequence[int], height: int, width: int, *, block: int, seed: int
) -> Tensor:
    """Return the order int64 `[n]` that all images of a run share.

    `order` is the cells themselves, or a kind; `random` is drawn once for the run.
    """
    if not isinstance(order, str):
        return torch.tensor(order)
    if order == "random":
        # On the CPU, whose generator gives every device the same order.
        generator = torch.Generator().manual_seed(derive_seed(seed, "order") >> 1)
        return torch.randperm(height * width, generator=generator)
    return fixed_order(cast(OrderKind, order), height=height, width=width, block=block)


def check_order(order: Tensor, num_tokens: int, num_images: int) -> None:
    """Raise UserError unless `order` is a permutation int64 `[b or 1, n]` of n = `num_tokens`."""
    if order.ndim == 2 and len(order) not in (1, num_images):
        raise UserError(
            f"there are {len(order)} orders for {num_images} images: give one for each, or one for"
            " all"
        )
    every = torch.arange(num_tokens, device=order.device)
    fits = order.ndim == 2 and order.shape[1] == num_tokens and order.dtype == torch.int64
    if not fits or not torch.equal(order.sort(dim=1).values, every.expand(len(order), -1)):
        raise UserError(
            f"the order is not a permutation of the {num_tokens} tokens: each row must contain"
            f" every integer from 0 to {num_tokens - 1} once, as int64"
        )


def fixed_order(kind: OrderKind, *, height: int, width: int, block: int = 1) -> Tensor:
    """Return an order that all images share, int64 `[n]`.

    Args:
        kind: `raster`: row by row. `nested_raster`: block by block in raster order, and in raster
            order within a block. `round_robin`: the first cell of every block in raster order,
            then the second cell of every block, and so on.
        block: k; ignored by `raster`.

    Raises:
        ValueError: k does not divide both sides, or the kind is `random`.
    """
    cells = torch.arange(height * width)
    if kind == "raster":
        return cells
    if kind == "random":
        raise ValueError("a random order is drawn for each image: see random_orders")
    if height % block or width % block:
        raise ValueError(f"blocks of {block}² do not divide a grid of {height} × {width}")
    # Dimensions: block row, row in the block, block column, column in the block.
    blocks = cells.view(height // block, block, width // block, block)
    if kind == "nested_raster":
        return blocks.permute(0, 2, 1, 3).flatten()
    return blocks.permute(1, 3, 0, 2).flatten()


def random_orders(
    sample_index: Tensor, num_cells: int, *, seed: int, purpose: str = "order"
) -> Tensor:
    """Draw an order for each image `[b]` as a function of seed and sample: int64 `[b, num_cells]`.

    All permutations are equally likely up to ties of 24-bit draws.
    """
    draws = uniform(sample_index, num_cells, seed=seed, purpose=purpose)
    # A stable sort breaks ties the same way on every device.
    return draws.argsort(dim=1, stable=True)


def gather_tokens(values: Tensor, order: Tensor) -> Tensor:
    """Gather `values` `[b, n, ...]` at the indices `order` `[m]` or `[b, m]`: `[b, m, ...]`."""
    index = order.expand(len(values), -1)
    index = index.reshape(*index.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def to_raster(ordered: Tensor, order: Tensor) -> Tensor:
    """Invert `gather_tokens`: return `ordered` `[b, n, ...]` in raster order."""
    return gather_tokens(ordered, order.argsort(dim=-1))
