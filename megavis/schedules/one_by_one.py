"""Autoregressive prediction: each token is predicted from all tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.schedules.orders import Orders, check_order
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step


class OneByOne(Schedule):
    """Predict one token per step: every position is a group of its own.

    Args:
        prefix: number of tokens at the start that are given, not predicted.
    """

    is_sequential = True
    names = ("order",)

    def __init__(self, orders: Orders, *, prefix: int = 0) -> None:
        self.orders, self.prefix = orders, prefix

    @property
    def needs_given(self) -> bool:
        """True if the model was trained with a prefix."""
        return self.prefix > 0

    @property
    def is_random(self) -> bool:
        """True if each image has its own order."""
        return self.orders.is_random

    def draw(self, index: Tensor) -> Arrangement:
        """Return the orders of samples `[b]`."""
        return self.along(self.orders.of(index), self.prefix)

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return the arrangement of `order`, int64 `[b or 1, n]`; by default the training order."""
        order: Tensor | None = choices.get("order")
        if order is None:
            return self.draw(index)
        check_order(order, self.orders.num_positions)
        return self.along(order.to(index.device), self.prefix)

    def for_features(self, index: Tensor) -> Arrangement:
        """Return the order that all images share."""
        return self.along(self.orders.shared(index.device), self.prefix)

    @staticmethod
    def along(order: Tensor, prefix: int = 0) -> Arrangement:
        """Return the arrangement that predicts along `order`, int64 `[b or 1, n]`."""
        count = order.shape[1]
        groups = torch.arange(1 - prefix, count + 1 - prefix, device=order.device)[None]
        # No token is predicted from the last one.
        return Arrangement(
            order,
            groups.clamp(min=0),
            num_content=count - 1,
            num_given=prefix,
            predicts_all=prefix == 0,
        )

    def order_of(self, images: Tensor, options: Any, *, seed: int) -> Tensor:
        """Return the orders that images with these indices have in training."""
        return self.orders.of(images)

    def first(self, order: Tensor, *, num_images: int, num_given: int, options: Any) -> Step | None:
        """Predict the first position that is not given; raise UserError if it is in the prefix."""
        if num_given < self.prefix:
            raise UserError(
                f"this model was trained with a prefix of {self.prefix} tokens: give as many, not"
                f" {num_given}"
            )
        return self._step(self.along(order, self.prefix), num_given, 0)

    def after(self, step: Step, progress: GenerationProgress, options: Any) -> Step | None:
        """Predict the next position."""
        return self._step(step.plan, step.asked.stop, step.number + 1)

    def _step(self, plan: Arrangement, position: int, number: int) -> Step | None:
        if position == plan.num_positions:
            return None
        asked = slice(position, position + 1)
        # One name for all steps: the position distinguishes their draws (`SamplingKeys`), which are
        # then made for many positions at once.
        return Step(plan, position, asked, number, "token")
