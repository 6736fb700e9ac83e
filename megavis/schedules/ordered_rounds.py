"""Rounds in a random order: tokens are predicted from those before them, several at once.

"Autoregressive Image Generation without Vector Quantization" (Li et al., 2024), section 3.4: "the
next set of tokens" is the next part of an order that is drawn for each image. No likelihood decides
which tokens are kept, so a density needs none.

Legend: b images, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megavis.config.section import LossAverage
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.masked import CosineRounds
from megavis.schedules.orders import check_order, random_orders
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step


@dataclass(frozen=True)
class OrderedRoundOptions(CosineRounds):
    """Options of generation. Raises UserError: a value is out of its range."""

    rounds: int = 64
    """Forward passes per image, 1 or more. After round i of r, a share cos(π/2 · i/r) of the tokens
    is hidden, rounded down, and at least one token fewer than before."""


class OrderedRounds(Schedule):
    """Hide a share of the tokens that is drawn for each image, the last ones of its order.

    Args:
        share: the distribution of the share.
        most_shown: tokens at the start of an order that are read in training: at least those that
            are shown in some image; others of them are hidden by the rows.
        loss_average: `batch`: all hidden tokens weigh the same; `images`: all images do.
        seed: the run's seed; order and share are functions of seed and sample.
    """

    options_type = OrderedRoundOptions
    is_random = True
    names = ("order",)

    def __init__(
        self, share: HiddenShare, *, most_shown: int, loss_average: LossAverage, seed: int
    ) -> None:
        self.share, self.most_shown, self.seed = share, most_shown, seed
        self.loss_average = loss_average

    @property
    def num_tokens(self) -> int:
        """Tokens n of an image."""
        return self.share.num_tokens

    def draw(self, index: Tensor) -> Arrangement:
        """Draw the orders of samples `[b]`, and how many of their tokens are hidden."""
        return self._hiding(random_orders(index, self.num_tokens, seed=self.seed), index)

    def _hiding(self, order: Tensor, index: Tensor) -> Arrangement:
        num_shown = self.num_tokens - self.num_predicted(index)[:, None]
        groups = torch.arange(self.num_tokens, device=order.device) >= num_shown
        return Arrangement(order, groups.long(), num_content=self.most_shown)

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Hide the last tokens of `order`, int64 `[b or 1, n]`, as many as in training.

        If neither samples nor an order are given, no token is hidden, as for features.

        Raises:
            UserError: the order is not a permutation.
        """
        order: Tensor | None = choices.get("order")
        if order is None:
            return self.draw(index) if is_named else self.for_features(index)
        check_order(order, self.num_tokens, len(index))
        return self._hiding(order.to(index.device).expand(len(index), -1), index)

    def for_features(self, index: Tensor) -> Arrangement:
        """Hide nothing, in raster order."""
        order = torch.arange(self.num_tokens, device=index.device)[None]
        return Arrangement(order, torch.zeros_like(order), num_content=self.num_tokens)

    def num_predicted(self, index: Tensor) -> Tensor:
        """Return the number of hidden tokens of samples `[b]`: float32 `[b]`."""
        return self.share.drawn(index, seed=self.seed)

    @cached_property
    def expected_predicted(self) -> float:
        """The expectation of `num_predicted`."""
        return self.share.mean

    def order_of(self, images: Tensor, *, seed: int) -> Tensor:
        """Draw an order for each image `[b]` as a function of seed and index: int64 `[b, n]`."""
        return random_orders(images, self.num_tokens, seed=seed)

    def share_known(self, step: Step, options: OrderedRoundOptions) -> float:
        """Return the share of the tokens known after a step.

        In the last step all tokens but one count as known, as in the guidance of the released code.
        """
        count = step.arrangement.num_positions
        return float(min(step.asked.stop, count - 1) / count)

    def first(self, order: Tensor, *, num_given: int, options: OrderedRoundOptions) -> Step | None:
        """Predict the first tokens of the order that are not given."""
        arrangement = Arrangement(order, torch.zeros_like(order), num_content=self.num_tokens)
        return self._step(arrangement, num_given, 0, num_given, options)

    def after(
        self, step: Step, progress: GenerationProgress, options: OrderedRoundOptions
    ) -> Step | None:
        """Predict the next tokens."""
        stop, given = step.asked.stop, step.num_given
        return self._step(step.arrangement, stop, step.number + 1, given, options)

    def _step(
        self,
        arrangement: Arrangement,
        position: int,
        number: int,
        num_given: int,
        options: OrderedRoundOptions,
    ) -> Step | None:
        count = arrangement.num_positions
        if position == count:
            return None
        hidden = torch.arange(count, device=arrangement.order.device) >= position
        groups = hidden.long().expand_as(arrangement.order)
        asked = slice(position, count - options.num_hidden(number, count - num_given))
        # One name for all steps: the position distinguishes their draws (`SamplingKeys`).
        return Step(
            replace(arrangement, groups=groups), position, asked, number, "token",
            num_given=num_given,
        )  # fmt: skip
