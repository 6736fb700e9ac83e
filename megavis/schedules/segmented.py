"""Order and groups of each image, drawn or named.

Legend: b images, T tokens of an image, K predicted groups.

Group after group: several tokens are predicted at once, from all groups before theirs.

In which order a sequence is predicted, and in which groups.

A sequence of T tokens is put in an order z and cut into K + 1 consecutive groups G_0 .. G_K at the
boundaries n_0 < n_1 < ... < n_{K-1} < n_K = T. G_0 is given; each further group is predicted from
the groups before it. All is drawn on the device as a function of seed and sample, and nothing waits
for the host.

Legend: b images, T tokens, K predicted groups, S condition tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.boundaries import Cut, Segmentation, bounds_of, fault_of_boundaries
from megavis.schedules.orders import Constant, check_order, random_orders
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step


@dataclass(frozen=True)
class GroupOptions:
    """How an image is generated.

    Raises:
        UserError: the number is below 1.
    """

    groups: int = 1
    """Groups of about one size into which the tokens that are not given are cut."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UserError(f"groups must be at least 1, not {self.groups}")


def evenly(num_given: int, num_tokens: int, num_groups: int) -> tuple[int, ...]:
    """Return where the given tokens end, and then each of `num_groups` groups of about one size.

    Raises:
        UserError: there are fewer tokens than groups, or none is given or left.
    """
    rest = num_tokens - num_given
    if not 0 < num_given < num_tokens or not 0 < num_groups <= rest:
        raise UserError(
            f"{num_tokens} tokens of which {num_given} are given cannot be predicted in"
            f" {num_groups} groups; there must be 1 to {max(rest, 1)}, and a token must be given"
        )
    return tuple(num_given + i * rest // num_groups for i in range(num_groups + 1))


class Groups(Schedule):
    """What any cut into groups has in common: the steps of generation."""

    options_type = GroupOptions

    @property
    def needs_given(self) -> bool:
        """True: the first group is predicted from something."""
        return True

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """Positions n of the sequence."""

    @property
    def columns(self) -> tuple[Mapping[str, Any], ...]:
        """Hidden tokens all at once, and in 4 and 12 groups."""
        hidden = max(1, self.num_positions * 3 // 4)
        return tuple({"groups": n} for n in sorted({1, min(4, hidden), min(12, hidden)}))

    def order_of(self, images: Tensor, options: GroupOptions, *, seed: int) -> Tensor:
        """Draw an order for each image `[b]`, a function of seed and number: int64 `[b, n]`."""
        return random_orders(images, self.num_positions, seed=seed)

    def first(
        self, order: Tensor, *, num_images: int, num_given: int, options: GroupOptions
    ) -> Step:
        """Ask for the first group.

        Raises:
            UserError: nothing is given, or there are more groups than tokens left.
        """
        ends = evenly(num_given, order.shape[1], options.groups)
        plan = Arrangement(
            order, self._groups(order, ends), num_content=order.shape[1], num_given=ends[0]
        )
        return Step(plan, ends[0], slice(ends[0], ends[1]), 0, "group/0")

    def after(self, step: Step, progress: GenerationProgress, options: GroupOptions) -> Step | None:
        """Ask for the next group."""
        count, number = step.plan.num_positions, step.number + 1
        if step.asked.stop == count:
            return None
        start = step.asked.stop
        stop = evenly(step.plan.num_given, count, options.groups)[number + 1]
        return replace(
            step, known=start, asked=slice(start, stop), number=number, name=f"group/{number}"
        )

    @staticmethod
    def _groups(order: Tensor, ends: tuple[int, ...]) -> Tensor:
        """Return the group of each position: int64 `[1, n]`."""
        starts = torch.tensor(ends[:-1], device=order.device)
        positions = torch.arange(order.shape[1], device=order.device)
        return (starts[:, None] <= positions).sum(0)[None]


class Grouping(Groups):
    """z, and the group of each of its places."""

    names = ("order", "boundaries")

    def __init__(
        self,
        cut: Cut,
        *,
        num_tokens: int,
        num_groups: int,
        boundaries: Sequence[int] | None = None,
        shuffled: bool,
        seed: int,
    ) -> None:
        """Build.

        Args:
            cut: how groups are cut.
            num_tokens: T.
            num_groups: K; of no meaning where boundaries are given.
            boundaries: n_0 .. n_{K-1}, where they are given.
            shuffled: each image has an order of its own, in place of raster order.
            seed: decides the draws, together with the sample.
        """
        self.cut, self.num_tokens, self.num_groups = cut, num_tokens, num_groups
        self.shuffled, self.seed = shuffled, seed
        self.bounds = bounds_of(cut, num_tokens, num_groups, boundaries)
        self._given = None if boundaries is None else Constant(torch.tensor(boundaries))

    @property
    def num_positions(self) -> int:
        """Places T of z."""
        return self.num_tokens

    @property
    def is_random(self) -> bool:
        """True where order or groups are drawn."""
        return self.shuffled or self.cut in ("random", "mixed")

    def draw(self, index: Tensor) -> Arrangement:
        """Return orders and groups of samples int64 `[b]`."""
        if self.shuffled:
            order = random_orders(index, self.num_tokens, seed=self.seed)
        else:
            order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, self._boundaries(index))

    def _arranged(self, order: Tensor, boundaries: Tensor) -> Arrangement:
        first, last = self.bounds
        groups = groups_of(boundaries, self.num_tokens)
        return Arrangement(order, groups, num_content=last, first_asked=first)

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return a user's order and groups; what is absent is drawn.

        All tokens are content, and all are asked for: where the groups lie follows from the data.

        Args:
            index: int64 `[b]`.
            choices: `order`, int64 `[b or 1, T]`; `boundaries`, n_0 .. n_{K-1}, of all images.
            is_named: of no meaning here.

        Raises:
            UserError: the order is no permutation, or the boundaries do not increase.
        """
        plan, order = self.draw(index), choices.get("order")
        boundaries: Sequence[int] | None = choices.get("boundaries")
        if order is not None:
            check_order(order, self.num_tokens)
            plan = replace(plan, order=order.to(index.device).expand(len(index), -1))
        if boundaries is not None:
            fault = fault_of_boundaries(boundaries, self.num_tokens)
            if fault:
                raise UserError(f"boundaries {fault}")
            ends = torch.as_tensor(boundaries, device=index.device).expand(len(index), -1)
            plan = self._arranged(plan.order, ends)
        return replace(plan, num_content=self.num_tokens, first_asked=0)

    def for_features(self, index: Tensor) -> Arrangement:
        """Return raster order and typical groups of training, without a draw."""
        if self.cut == "given":
            boundaries = self._boundaries(index)
        else:
            boundaries = typical_boundaries(
                self.cut, self.num_tokens, self.num_groups, device=index.device
            ).expand(len(index), -1)
        order = torch.arange(self.num_tokens, device=index.device).expand(len(index), -1)
        return self._arranged(order, boundaries)

    def _boundaries(self, index: Tensor) -> Tensor:
        """Return n_0 .. n_{K-1} of samples `[b]`: int64 `[b, K]`."""
        if self.cut == "given":
            assert self._given is not None
            return self._given.on(index.device).expand(len(index), -1)
        return draw_boundaries(
            self.cut,
            index,
            num_tokens=self.num_tokens,
            num_groups=self.num_groups,
            seed=self.seed,
        )


MEAN_SHARE, SHARE_DEVIATION = 0.5, 0.1
"""p ~ N(0.5, 0.1): the second number is the deviation in the code of appendix B."""


def draw_boundaries(
    kind: Segmentation, sample_index: Tensor, *, num_tokens: int, num_groups: int, seed: int
) -> Tensor:
    """Return n_0 .. n_{K-1} of each sample: int64 `[b, K]`, increasing, each in [0, T - 1].

    Args:
        kind: which of the paper's three settings.
        sample_index: int64 `[b]`.
        num_tokens: T.
        num_groups: K; at most `most_groups(kind, T)`.
        seed: the run's seed.
    """
    if kind == "fixed":
        fixed = fixed_length(num_tokens, num_groups, device=sample_index.device)
        return fixed.expand(len(sample_index), -1)
    draws = uniform(sample_index, num_tokens - 1, seed=seed, purpose="boundaries")
    if kind == "random":
        return _smallest(draws, num_groups)
    share = uniform(sample_index, 1, seed=seed, purpose="share")
    return mixed_length(draws, share, num_groups)


def fixed_length(num_tokens: int, num_groups: int, device: torch.device | None = None) -> Tensor:
    """Return `fixed_boundaries`, computed on the device: int64 `[K]`."""
    places = torch.arange(1, num_groups + 1, device=device)
    return places * num_tokens // (num_groups + 1)


def mixed_length(draws: Tensor, share: Tensor, num_groups: int) -> Tensor:
    """Return n_{K-1} = round(p T) with p ~ N(0.5, 0.1), and K - 1 random boundaries before it.

    The paper leaves open what to do when p is extreme. Here n_{K-1} is clamped to [K, T - 1]: then
    there are K - 1 places for the other boundaries and G_K is not empty. At T = 196 and K = 20 one
    image in about 30,000 is clamped.

    Args:
        draws: uniform `[b, T - 1]`, one for each place from 1 to T - 1.
        share: uniform `[b, 1]`, from which p is made.
        num_groups: K.
    """
    num_tokens = draws.shape[1] + 1
    normal = torch.erfinv(2.0 * share - 1.0) * 2.0**0.5
    last = (num_tokens * (MEAN_SHARE + SHARE_DEVIATION * normal)).round()
    last = last.clamp(num_groups, num_tokens - 1).long()
    places = torch.arange(1, num_tokens, device=draws.device)
    earlier = _smallest(draws.masked_fill(places >= last, 2.0), num_groups - 1)
    return torch.cat([earlier, last], dim=1)


def typical_boundaries(
    kind: Segmentation, num_tokens: int, num_groups: int, device: torch.device | None = None
) -> Tensor:
    """Return boundaries without a draw, in the middle of what training draws: int64 `[K]`.

    For features, which should not depend on chance: evenly spaced, with mixed length up to T / 2.
    """
    if kind != "mixed":
        return fixed_length(num_tokens, num_groups, device)
    last = min(max(round(MEAN_SHARE * num_tokens), num_groups), num_tokens - 1)
    return torch.arange(1, num_groups + 1, device=device) * last // num_groups


def _smallest(draws: Tensor, count: int) -> Tensor:
    """Return in ascending order the places, counted from 1, of the `count` smallest draws."""
    chosen = draws.argsort(dim=1, stable=True)[:, :count] + 1
    return chosen.sort(dim=1).values


def groups_of(boundaries: Tensor, num_tokens: int) -> Tensor:
    """Return the group of each place of the order: int64 `[b, T]`, from 0 to K.

    Args:
        boundaries: n_0 .. n_{K-1}, int64 `[b, K]`, increasing.
        num_tokens: T.
    """
    places = torch.arange(num_tokens, device=boundaries.device)
    return (boundaries[:, :, None] <= places).sum(dim=1)
