"""In which order the tokens of an image are predicted: one for all images, or drawn for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from megavis.config.choices import OrderKind
from megavis.config.errors import UserError
from megavis.model.orders import Constant, fixed_order, random_orders
from megavis.parallel.random import derive_seed


class Orders:
    """The token at each position: shared by all images, or drawn for each."""

    def __init__(self, shared: Tensor, *, seed: int | None = None) -> None:
        """Build.

        Args:
            shared: int64 `[n]`, the order of all images, or of features where each has its own.
            seed: draws an order for each image; None: they share one.
        """
        self._shared, self._seed = Constant(shared), seed
        self.num_positions = len(shared)

    @classmethod
    def of_kind(cls, kind: OrderKind, height: int, width: int, *, block: int, seed: int) -> Orders:
        """Return the orders of a grid: of `random` each image has its own, features raster.

        Args:
            kind: as `fixed_order` has it, or `random`.
            height: rows of the grid.
            width: its columns.
            block: side of a block, for the kinds that have blocks.
            seed: of the run.
        """
        is_random = kind == "random"
        shared = fixed_order(
            "raster" if is_random else kind, height=height, width=width, block=block
        )
        return cls(shared, seed=seed if is_random else None)

    @property
    def is_random(self) -> bool:
        """True where each image has an order of its own."""
        return self._seed is not None

    def of(self, index: Tensor) -> Tensor:
        """Return the orders of samples int64 `[b]`: int64 `[b or 1, n]`."""
        if self._seed is None:
            return self.shared(index.device)
        return random_orders(index, self.num_positions, seed=self._seed)

    def shared(self, device: torch.device) -> Tensor:
        """Return the order without chance: int64 `[1, n]`."""
        return self._shared.on(device)[None]


def order_of_run(order: str | Sequence[int], side: int, *, block: int, seed: int) -> Tensor:
    """Return the order int64 `[n]` that all images of a run share.

    Args:
        order: a kind, of which `random` is drawn once for the run, or the cells themselves.
        side: of the grid.
        block: side of a block, for the kinds that have blocks.
        seed: of the run.
    """
    if not isinstance(order, str):
        return torch.tensor(order)
    if order == "random":
        generator = torch.Generator().manual_seed(derive_seed(seed, "order") >> 1)
        return torch.randperm(side**2, generator=generator)
    return fixed_order(cast(OrderKind, order), height=side, width=side, block=block)


def check_order(order: Tensor, num_tokens: int) -> None:
    """Check for permutations: int64 `[b, T]` with each of 0 .. T - 1 once in a row.

    Raises:
        UserError: when a row is none.
    """
    every = torch.arange(num_tokens, device=order.device)
    fits = order.ndim == 2 and order.shape[1] == num_tokens
    if not fits or not torch.equal(order.sort(dim=1).values, every.expand(len(order), -1)):
        raise UserError(
            f"the order is no permutation of the {num_tokens} tokens: each row must name every"
            f" number from 0 to {num_tokens - 1} once"
        )
