"""Images filled in group by group: what is predicted is seen when the next group is predicted.

Some patches are given, the others are cut into groups. One group is masked modelling's way: all at
once. Which paper does so, the objective says that offers `GroupByGroup`.

Legend: b images, T patches of an image, d numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import random_orders, take_places
from megavis.model.runner import Runner
from megavis.parallel.random import derive_seed


@runtime_checkable
class GroupByGroup(Protocol):
    """What an objective offers, where several patches are predicted from any others."""

    @property
    def num_tokens(self) -> int:
        """Patches T of an image."""

    def check_filling(self) -> None:
        """Raise UserError when models of this config predict no pixels."""

    def patches_of(self, images: Any) -> Tensor:
        """Cut images uint8 `[b, h, w, 3]` into patches `[b, T, d]` in raster order."""

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`, rounded and clipped to uint8."""

    def inputs_of_group(
        self, patches: Tensor, order: Tensor, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Return the inputs that ask for the last group, all before it being known.

        Args:
            patches: `[b, T, d]` in raster order.
            order: int64 `[b, T]`.
            boundaries: where each group ends in the order, the last asked for included.
        """


@dataclass(frozen=True)
class Filled:
    """What became of images of which some patches were given.

    Attributes:
        images: uint8 `[b, h, w, 3]`, what was given as it was.
        given: bool `[b, T]` in raster order.
    """

    images: Tensor
    given: Tensor


def evenly(num_given: int, num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return where the given patches end, and then each of `num_groups` groups of one size.

    Raises:
        UserError: there are fewer patches than groups, or none is given or left.
    """
    rest = num_tokens - num_given
    if not 0 < num_given < num_tokens or not 0 < num_groups <= rest:
        raise UserError(
            f"{num_tokens} patches of which {num_given} are given cannot be filled in"
            f" {num_groups} groups; there must be 1 to {max(rest, 1)}"
        )
    return tuple(num_given + i * rest // num_groups for i in range(num_groups + 1))


def fill(
    runner: Runner,
    objective: GroupByGroup,
    images: Tensor,
    *,
    share_given: float,
    num_groups: int,
    num_orders: int = 1,
    seed: int = 0,
) -> Filled:
    """Give a random share of each image's patches and predict the others, group by group.

    What a later group is predicted from has errors, which depend on the order; the mean over
    several orders has less of them. All at once there is nothing that an order could change.

    Args:
        runner: the model.
        objective: the paper.
        images: uint8 `[b, h, w, 3]`.
        share_given: of the patches; the same ones whatever `num_groups` is.
        num_groups: into which the others are cut.
        num_orders: the predictions are the mean over so many orders of the others.
        seed: decides what is given and the order of the rest.

    Raises:
        UserError: the model predicts no pixels, or there are fewer patches than groups.
    """
    objective.check_filling()
    count = objective.num_tokens
    ends = evenly(round(share_given * count), count, num_groups)
    index = torch.arange(len(images), device=images.device)
    order = random_orders(index, count, seed=seed)
    patches = objective.patches_of(images)
    given = torch.zeros(len(images), count, dtype=torch.bool, device=images.device)
    given.scatter_(1, order[:, : ends[0]], True)
    # What is not given is not there: no prediction may depend on it.
    known = patches.masked_fill(~given[..., None], 0.0)
    total = torch.zeros_like(known)
    passes = num_orders if num_groups > 1 else 1
    for number in range(passes):
        total += _fill_in_order(runner, objective, known, order, ends)
        order = _shuffle_rest(order, ends[0], seed=derive_seed(seed, "fill", number))
    made = objective.patches_of(objective.images_of(total / passes))
    shown = torch.where(given[..., None], patches, made)
    return Filled(objective.images_of(shown), given)


def _fill_in_order(
    runner: Runner, objective: GroupByGroup, known: Tensor, order: Tensor, ends: tuple[int, ...]
) -> Tensor:
    """Return all patches `[b, T, d]`, those after the first `ends[0]` of the order predicted."""
    for number in range(1, len(ends)):
        inputs = objective.inputs_of_group(known, order, ends[: number + 1])
        predicted = runner.predictions(inputs).float()
        asked = order[:, ends[number - 1] : ends[number], None].expand_as(predicted)
        known = known.scatter(1, asked, predicted)
    return known


def _shuffle_rest(order: Tensor, num_given: int, *, seed: int) -> Tensor:
    """Return another order `[b, T]` that begins with the same places."""
    rest = order[:, num_given:]
    index = torch.arange(len(order), device=order.device)
    shuffled = take_places(rest, random_orders(index, rest.shape[1], seed=seed))
    return torch.cat([order[:, :num_given], shuffled], dim=1)


def patches_to_pixels(chosen: Tensor, height: int, width: int) -> Tensor:
    """Return which pixels lie in chosen patches: bool `[b, T]` to `[b, h, w]`.

    Args:
        chosen: in raster order, of square patches.
        height: h.
        width: w.
    """
    side = round((height * width / chosen.shape[1]) ** 0.5)
    cells = chosen.view(len(chosen), height // side, width // side)
    return cells.repeat_interleave(side, 1).repeat_interleave(side, 2)
