"""Segmented schedules: group by group, several tokens are predicted at once.

A sequence of T tokens is put in an order z and cut into K + 1 consecutive groups G_0 .. G_K at the
boundaries n_0 < n_1 < ... < n_{K-1} < n_K = T. G_0 is given, and every other group is predicted
from the groups before it. Orders and boundaries are drawn on the device as functions of seed and
sample, without synchronizing with the host.

Legend: b images, T tokens of an image, K predicted groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.section import LossAverage
from megavis.grammar.boundaries import Cut, boundaries_error, boundary_range, fixed_boundaries
from megavis.parallel.device import DeviceConstant
from megavis.parallel.random import uniform
from megavis.schedules.orders import check_order, random_orders
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step

MEAN_SHARE, SHARE_DEVIATION = 0.5, 0.1
"""p ~ N(0.5, 0.1), where 0.1 is the standard deviation, as in the code of appendix B."""


@dataclass(frozen=True)
class GroupOptions:
    """Options of generation group by group. Raises UserError: `groups` is below 1."""

    groups: int = 1
    """Number of groups, of about equal size, into which the tokens to generate are cut."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UserError(f"groups must be at least 1, not {self.groups}")


class Groups(Schedule):
    """Group by group: draw or fix the order z and the group boundaries of each image.

    Args:
        boundaries: n_0 .. n_{K-1} if `cut` is `given`, else None.
        shuffled: draw an order for each image instead of raster order.
        draws_features: draw order and groups for features too, as in training.
        loss_average: `batch`: all predicted tokens weigh the same; `images`: all images do.
        seed: the run's seed; draws are functions of seed and sample.
    """

    options_type = GroupOptions
    needs_given = True
    names = ("order", "boundaries")

    def __init__(
        self,
        cut: Cut,
        *,
        num_tokens: int,
        num_groups: int,
        boundaries: Sequence[int] | None = None,
        shuffled: bool,
        draws_features: bool = False,
        loss_average: LossAverage = "batch",
        seed: int,
    ) -> None:
        self.draws_features, self.loss_average = draws_features, loss_average
        self.cut, self.num_tokens, self.num_groups = cut, num_tokens, num_groups
        self.shuffled, self.seed = shuffled, seed
        self.bounds = boundary_range(cut, num_tokens, num_groups, boundaries)
        constant = fixed_boundaries(num_tokens, num_groups) if cut == "fixed" else boundaries
        typical = constant or typical_boundaries(cut, num_tokens, num_groups)
        self._constant = None if constant is None else DeviceConstant(torch.tensor(constant))
        self._typical = DeviceConstant(torch.tensor(typical))

    @property
    def given_share(self) -> float:
        """A quarter: `columns` generates the others."""
        return 0.25

    @property
    def columns(self) -> tuple[Mapping[str, Any], ...]:
        """All hidden tokens at once, and in 4 and 12 groups."""
        hidden = max(1, self.num_tokens * 3 // 4)
        return tuple({"groups": n} for n in sorted({1, min(4, hidden), min(12, hidden)}))

    @property
    def is_random(self) -> bool:
        """True if orders or groups are drawn."""
        return self.shuffled or self.cut in ("random", "mixed")

    def draw(self, index: Tensor) -> Arrangement:
        """Return orders and groups of samples int64 `[b]`."""
        if self.shuffled:
            order = random_orders(index, self.num_tokens, seed=self.seed)
        else:
            order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, self._boundaries(index))

    def num_predicted(self, index: Tensor) -> Tensor:
        """Return T - n_0 of samples `[b]`: float32 `[b]`."""
        return (self.num_tokens - self._boundaries(index)[:, 0]).float()

    @cached_property
    def expected_predicted(self) -> float:
        """The expectation of `num_predicted`."""
        count, groups = self.num_tokens, self.num_groups
        if self.cut == "random":  # n_0 is the least of K places drawn from 1 to T - 1.
            return count - count / (groups + 1)
        if self.cut == "mixed":  # The least of K - 1 from 1 to n_{K-1} - 1, or n_{K-1} itself.
            return count - expected_last(count, groups) / groups
        return float(count - self.bounds[0])

    def _arranged(self, order: Tensor, boundaries: Tensor) -> Arrangement:
        first, last = self.bounds
        groups = groups_of(boundaries, self.num_tokens)
        return Arrangement(order, groups, num_content=last, first_asked=first)

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return the arrangement of a user's order and groups; draw those that are absent.

        The choices are `order`, int64 `[b or 1, T]`, and `boundaries`, n_0 .. n_{K-1} for all
        images. All tokens are content and all are predicted, so that shapes do not depend on
        boundaries.

        Raises:
            UserError: the order is not a permutation, or the boundaries do not increase.
        """
        arrangement, order = self.draw(index), choices.get("order")
        boundaries: Sequence[int] | None = choices.get("boundaries")
        if order is not None:
            check_order(order, self.num_tokens, len(index))
            arrangement = replace(arrangement, order=order.to(index.device).expand(len(index), -1))
        if boundaries is not None:
            ends = torch.as_tensor(boundaries, device=index.device)
            if ends.ndim != 1 or ends.is_floating_point():
                raise UserError(f"boundaries must be a list of whole numbers, not {boundaries}")
            fault = boundaries_error(ends.tolist(), self.num_tokens)
            if fault:
                raise UserError(f"boundaries {fault}")
            ends = ends.expand(len(index), -1)
            arrangement = self._arranged(arrangement.order, ends)
        return replace(arrangement, num_content=self.num_tokens, first_asked=0)

    @property
    def has_random_features(self) -> bool:
        """True if features have drawn orders or groups."""
        return self.draws_features and self.is_random

    def for_features(self, index: Tensor) -> Arrangement:
        """Return order and groups as in training, or raster order with the typical groups."""
        if self.draws_features:
            return self.draw(index)
        order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, self._typical.on(index.device).expand(len(index), -1))

    def _boundaries(self, index: Tensor) -> Tensor:
        """Return n_0 .. n_{K-1} of samples `[b]`: int64 `[b, K]`."""
        if self._constant is not None:
            return self._constant.on(index.device).expand(len(index), -1)
        draws = uniform(index, self.num_tokens - 1, seed=self.seed, purpose="boundaries")
        if self.cut == "random":
            return _smallest(draws, self.num_groups)
        share = uniform(index, 1, seed=self.seed, purpose="share")
        return mixed_length(draws, share, self.num_groups)

    def order_of(self, images: Tensor, *, seed: int) -> Tensor:
        """Draw an order for each image `[b]` as a function of seed and index: int64 `[b, n]`."""
        return random_orders(images, self.num_tokens, seed=seed)

    def first(self, order: Tensor, *, num_given: int, options: GroupOptions) -> Step:
        """Predict the first group; raise UserError if nothing is given, or a group is empty."""
        ends = even_group_ends(num_given, order.shape[1], options.groups)
        groups = groups_of(torch.tensor([ends[:-1]], device=order.device), order.shape[1])
        arrangement = Arrangement(order, groups, num_content=order.shape[1], num_given=ends[0])
        return Step(arrangement, ends[0], slice(ends[0], ends[1]), 0, "group/0")

    def after(self, step: Step, progress: GenerationProgress, options: GroupOptions) -> Step | None:
        """Predict the next group."""
        count, number = step.arrangement.num_positions, step.number + 1
        if step.asked.stop == count:
            return None
        start = step.asked.stop
        stop = even_group_ends(step.arrangement.num_given, count, options.groups)[number + 1]
        return replace(
            step, known=start, asked=slice(start, stop), number=number, name=f"group/{number}"
        )


def even_group_ends(num_given: int, num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return the ends of given tokens and even groups; raise UserError if one is empty."""
    rest = num_tokens - num_given
    if not 0 < num_given < num_tokens or not 0 < num_groups <= rest:
        raise UserError(
            f"{num_tokens} tokens, {num_given} of them given, cannot be predicted in"
            f" {num_groups} groups; use 1 to {max(rest, 1)} groups and give at least one token"
        )
    return tuple(num_given + i * rest // num_groups for i in range(num_groups + 1))


def mixed_length(draws: Tensor, share: Tensor, num_groups: int) -> Tensor:
    """Return n_{K-1} = round(p T) with p ~ N(0.5, 0.1), and K - 1 random boundaries before it.

    The paper does not define extreme values of p. Here n_{K-1} is clamped to [K, T - 1], which
    leaves room for the other K - 1 boundaries and keeps G_K from being empty. At T = 196 and K = 20
    about one image in 30,000 is clamped.

    Args:
        draws: uniform `[b, T - 1]`, one for each possible boundary from 1 to T - 1.
        share: uniform `[b, 1]`, mapped to p.
    """
    num_tokens = draws.shape[1] + 1
    # By inversion of one draw: a share of 0 gives -∞, which is clamped to the first legal boundary.
    normal = torch.erfinv(2.0 * share - 1.0) * 2.0**0.5
    last = (num_tokens * (MEAN_SHARE + SHARE_DEVIATION * normal)).round()
    last = last.clamp(num_groups, num_tokens - 1).long()
    places = torch.arange(1, num_tokens, device=draws.device)
    # Draws are below 1, so 2 sorts places from the last boundary on behind all others.
    earlier = _smallest(draws.masked_fill(places >= last, 2.0), num_groups - 1)
    return torch.cat([earlier, last], dim=1)


def expected_last(num_tokens: int, num_groups: int) -> float:
    """Return the expectation of n_{K-1} with mixed length."""
    # E[n] is the sum over k of P(n > k), where n is at least K and at most T - 1.
    z = [((k + 0.5) / num_tokens - MEAN_SHARE) / SHARE_DEVIATION for k in range(num_tokens - 1)]
    return num_groups + sum(math.erfc(each / math.sqrt(2)) / 2 for each in z[num_groups:])


def typical_boundaries(cut: Cut, num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return n_0 .. n_{K-1} typical of those drawn in training, for features.

    They are evenly spaced, up to T / 2 with mixed length.
    """
    if cut != "mixed":
        return fixed_boundaries(num_tokens, num_groups)
    last = min(max(round(MEAN_SHARE * num_tokens), num_groups), num_tokens - 1)
    return tuple(place * last // num_groups for place in range(1, num_groups + 1))


def _smallest(draws: Tensor, count: int) -> Tensor:
    """Return the positions, counted from 1, of the `count` smallest draws, in ascending order."""
    # The first elements of a random permutation are a random subset, drawn without a loop and
    # without synchronizing with the device.
    chosen = draws.argsort(dim=1, stable=True)[:, :count] + 1
    return chosen.sort(dim=1).values


def groups_of(boundaries: Tensor, num_tokens: int) -> Tensor:
    """Return the group of each position of the order: int64 `[b, T]`, from 0 to K.

    Boundaries n_0 .. n_{K-1}, int64 `[b, K]`, increase.
    """
    places = torch.arange(num_tokens, device=boundaries.device)
    return (boundaries[:, :, None] <= places).sum(dim=1)
