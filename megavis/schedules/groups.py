"""Group after group: several tokens are predicted at once, from all groups before theirs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import random_orders
from megavis.schedules.base import Arrangement, GenerationProgress, Schedule, Step


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
