"""Some tokens hidden at random, and predicted from the others.

`MaskedShare`: each token is hidden with one probability, as in BERT. `Rounds`: the share itself is
drawn for each image, and images are generated in rounds, after "MaskGIT: Masked Generative Image
Transformer" (Chang et al., 2022): after round i of T, the share cos(π/2 · i/T) of the tokens is
hidden again, those of the lowest confidence: log-likelihood + t_C · (1 - i/T) · Gumbel noise, t_C
the choice temperature.

Legend: b images, n tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.orders import Orders, take_places
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step


class Masked(Schedule):
    """Hidden tokens are group 1, the others group 0; all are read, in one order."""

    takes_given = False
    names = ("mask",)

    def __init__(self, orders: Orders, *, seed: int) -> None:
        """Build.

        Args:
            orders: the token at each position, the same for all images.
            seed: of the run, which with the sample decides what is hidden.
        """
        self.orders, self.seed = orders, seed

    @property
    def is_random(self) -> bool:
        """True: what is hidden is drawn."""
        return True

    def draw(self, index: Tensor) -> Arrangement:
        """Hide tokens of samples `[b]`."""
        return self.hiding(self.draw_hidden(index))

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Hide `mask`, bool `[b, n]` in raster order.

        When absent, what the named samples hide in training; without any, what features hide of
        sample 0.
        """
        mask: Tensor | None = choices.get("mask")
        if mask is None:
            return self.draw(index) if is_named else self.for_features(torch.zeros_like(index))
        shape = (len(index), self.orders.num_positions)
        if mask.shape != shape or mask.dtype != torch.bool:
            raise UserError(
                f"the mask has shape {list(mask.shape)} and type {mask.dtype}; this run takes bool"
                f" {list(shape)}"
            )
        return self.hiding(mask.to(index.device))

    @abstractmethod
    def draw_hidden(self, index: Tensor) -> Tensor:
        """Return bool `[b, n]` in raster order, true where a token of samples `[b]` is hidden."""

    def hiding(self, hidden: Tensor) -> Arrangement:
        """Return the arrangement in which these are hidden: bool `[b, n]` in raster order."""
        order = self.orders.shared(hidden.device)
        groups = take_places(hidden.long(), order)
        return Arrangement(order, groups, num_content=order.shape[1])

    def for_features(self, index: Tensor) -> Arrangement:
        """Hide nothing."""
        order = self.orders.shared(index.device)
        return Arrangement(order, torch.zeros_like(order), num_content=order.shape[1])


class MaskedShare(Masked):
    """Each token is hidden with the same probability, independently of the others."""

    def __init__(self, orders: Orders, *, share: float, seed: int) -> None:
        super().__init__(orders, seed=seed)
        self.share = share

    def draw_hidden(self, index: Tensor) -> Tensor:
        """See `Masked`."""
        count = self.orders.num_positions
        return uniform(index, count, seed=self.seed, purpose="bert-mask") < self.share

    @property
    def has_random_features(self) -> bool:
        """True: hidden for features too, "to keep inputs in-distribution" (iGPT, section 4.6)."""
        return True

    def for_features(self, index: Tensor) -> Arrangement:
        """Hide what training hides."""
        return self.draw(index)


@dataclass(frozen=True)
class RoundOptions:
    """How many rounds, and how much chance decides what stays.

    Raises:
        UserError: a value is out of its range.
    """

    rounds: int = 16
    choice_temperature: float = 35.0
    """t_C: 35 for 256² pixels without guidance, 60 with (GIVT, table 1), 140 for 512² (figure
    18)."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"the number of rounds must be 1 or more, not {self.rounds}")
        if not self.choice_temperature >= 0:
            raise UserError(
                f"the choice temperature must be 0 or more, not {self.choice_temperature}"
            )

    def num_hidden(self, step: int, num_tokens: int) -> int:
        """Return how many tokens stay hidden after round `step`, counted from 0.

        At least one token is uncovered in every round while there are any.
        """
        hidden = num_tokens
        for number in range(step + 1):
            share = math.cos(math.pi / 2 * (number + 1) / self.rounds)
            # The last cosine is not exactly 0 in floating point, but its floor is.
            hidden = max(0, min(hidden - 1, math.floor(share * num_tokens)))
        return hidden


class Rounds(Masked):
    """A share cos(π/2 · u) of the tokens is hidden, u drawn for each image."""

    options_type = RoundOptions
    needs_score = True

    def __init__(self, orders: Orders, *, least_masking: float, seed: int) -> None:
        """Build.

        Args:
            orders: see `Masked`.
            least_masking: u is uniform in [0, 1 - this).
            seed: see `Masked`.
        """
        super().__init__(orders, seed=seed)
        self.least_masking = least_masking

    def draw_hidden(self, index: Tensor) -> Tensor:
        """See `Masked`."""
        draw = uniform(index, 1, seed=self.seed, purpose="masked-share")
        share = torch.cos(math.pi / 2 * (1.0 - self.least_masking) * draw)
        count = (share * self.orders.num_positions).ceil()
        order = uniform(index, self.orders.num_positions, seed=self.seed, purpose="mask")
        rank = order.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        return rank < count

    def order_of(self, images: Tensor, options: RoundOptions, *, seed: int) -> Tensor:
        """Return the order of all images: int64 `[1, n]`."""
        return self.orders.shared(images.device)

    def first(
        self, order: Tensor, *, num_images: int, num_given: int, options: RoundOptions
    ) -> Step:
        """Hide all tokens and ask for all."""
        shape = (num_images, order.shape[1])
        hidden = torch.ones(shape, dtype=torch.bool, device=order.device)
        plan = Arrangement(order, hidden.long(), num_content=order.shape[1])
        return Step(plan, 0, slice(0, order.shape[1]), 0, "round/0", hidden=hidden)

    def after(self, step: Step, progress: GenerationProgress, options: RoundOptions) -> Step | None:
        """Hide the least confident of the tokens that were drawn; ask for these again."""
        assert step.hidden is not None
        assert progress.score is not None
        count, number = step.plan.num_positions, step.number
        left = options.num_hidden(number, count)
        if not left:
            return None
        heat = options.choice_temperature * (1.0 - (number + 1) / options.rounds)
        draws = uniform(progress.images, count, seed=progress.seed, purpose=f"choice/{number}")
        confidence = progress.score.float() + heat * _gumbel(draws)
        confidence = confidence.masked_fill(~step.hidden, float("inf"))
        hidden = lowest(confidence, left)
        plan = replace(step.plan, groups=hidden.long())
        return Step(plan, 0, step.asked, number + 1, f"round/{number + 1}", hidden=hidden)


def lowest(confidence: Tensor, count: int) -> Tensor:
    """Return bool `[b, n]`, true at the `count` lowest of each row of `[b, n]`."""
    places = confidence.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, places, True)


def _gumbel(draws: Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1) into Gumbel noise."""
    # Half a unit of the 24 bits: neither logarithm may be of 0.
    return -torch.log(-torch.log(draws.double() + 2.0**-25)).float()
