"""Autoregressive prediction: each token is predicted from all tokens before it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.orders import Orders, check_order
from megavis.schedules.schedule import (
    Arrangement,
    GenerationProgress,
    NoOptions,
    Schedule,
    Step,
)


@dataclass(frozen=True)
class RoundOptions:
    """Options of generation. Raises UserError: a value is out of its range."""

    rounds: int | None = None
    """Forward passes per image, 1 or more; None: one for each token. With fewer, the number of
    tokens that a pass asks for at once grows along a cosine, from one in the first."""

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise UserError(f"the number of rounds must be 1 or more, not {self.rounds}")

    def num_asked(self, number: int, num_done: int, count: int) -> int:
        """Return how many tokens pass `number`, counted from 0, asks for.

        After pass i of r, 1 + (1 - cos(π/2 · (i + 1) / r)) · n of n tokens are known, and at least
        one more than before: "RandAR: Decoder-only Autoregressive Visual Generation in Random
        Orders", section 3.3, and its released code.

        Args:
            num_done: tokens that earlier passes have sampled, less than `count`.
            count: tokens to sample in all passes, n.
        """
        if self.rounds is None or (number == 0 and self.rounds > 1):
            return 1
        share = 1.0 - math.cos(math.pi / 2 * (number + 1) / self.rounds)
        # The last cosine is not exactly 0 in floating point; adding 1 before truncation absorbs it.
        return min(max(int(share * count + 1) - num_done, 1), count - num_done)


@dataclass(frozen=True)
class Annealing:
    """A share that falls linearly from 1 to 0 during training.

    "Randomized Autoregressive Visual Generation", section 3.2.

    Attributes:
        start: the step from which it falls.
        end: the step from which it is 0; not below `start`.
        num_steps: steps of the training.
    """

    start: float
    end: float
    num_steps: int

    def share(self, step: int) -> float:
        """Return the share in [0, 1] of an optimizer step, counted from 0."""
        if step < self.start:
            return 1.0
        if step >= self.end:
            return 0.0
        return 1.0 - (step - self.start) / (self.end - self.start)

    @property
    def last(self) -> float:
        """The share of the last step."""
        return self.share(self.num_steps - 1)


class OneByOne(Schedule):
    """Predict one token per step: every position is a group of its own.

    For the prefix, whose tokens attend to each other, see "Exploring the Limits of Transfer
    Learning with a Unified Text-to-Text Transformer", section 3.2.1.

    Args:
        prefix: number of tokens at the start that are given, not predicted; or `drawn` for each
            image, uniformly from 1 to n - 1.
        first_asked: first position that some row predicts, at most the shortest prefix; this is
            also the number of idle rows at the end.
        asks_several: whether generation can ask for several tokens at once.
        seed: seed of drawn prefixes.
        annealing: how the share of drawn orders falls; None: it is constant.
    """

    is_sequential = True

    def __init__(
        self,
        orders: Orders,
        *,
        prefix: int | Literal["drawn"] = 0,
        first_asked: int = 0,
        asks_several: bool = False,
        seed: int = 0,
        annealing: Annealing | None = None,
    ) -> None:
        self.options_type = RoundOptions if asks_several else NoOptions
        last = None if annealing is None else annealing.last
        self.orders = orders if last is None else orders.with_share(last)
        self.annealing, self.draws_prefix, self.seed = annealing, prefix == "drawn", seed
        self.prefix = 1 if prefix == "drawn" else prefix
        self.first_asked = first_asked

    def at(self, step: int | None) -> OneByOne:
        """Return the schedule of a step, whose share of drawn orders is annealed."""
        if self.annealing is None or step is None:
            return self
        other = copy.copy(self)
        other.orders = self.orders.with_share(self.annealing.share(step))
        return other

    def samples_one(self, options: Any) -> bool:
        """Return whether there are as many rounds as tokens, or no such option."""
        return self.options_type is NoOptions or options.rounds is None

    @property
    def names(self) -> tuple[str, ...]:
        """The order, and a prefix if it is drawn."""
        return ("order", "prefix") if self.draws_prefix else ("order",)

    @property
    def needs_given(self) -> bool:
        """True if the model was trained with a prefix."""
        return self.prefix > 0

    @property
    def given_share(self) -> float:
        """Half, or a longer prefix."""
        return max(super().given_share, self.prefix / self.orders.num_positions)

    @property
    def is_random(self) -> bool:
        """True if each image has its own order or prefix."""
        return self.orders.is_random or self.draws_prefix

    def draw(self, index: Tensor) -> Arrangement:
        """Return the orders and prefixes of samples `[b]`."""
        return self._arranged(self.orders.of(index), self._prefix_of(index))

    def _prefix_of(self, index: Tensor) -> int | Tensor:
        """Return the prefix of all samples `[b]`, or the one of each: int64 `[b, 1]`."""
        if not self.draws_prefix:
            return self.prefix
        longest = self.orders.num_positions - 1
        draws = uniform(index, 1, seed=self.seed, purpose="prefix")
        return (draws * longest).long().clamp(max=longest - 1) + 1

    def _arranged(self, order: Tensor, prefix: int | Tensor) -> Arrangement:
        """Return the arrangement along `order`, int64 `[b or 1, n]`.

        `prefix`: given tokens of all images, or of each, int64 `[b, 1]`.
        """
        count, first = order.shape[1], self.first_asked
        groups = torch.arange(1, count + 1, device=order.device)[None] - prefix
        # No token is predicted from the last one. Without a start token an idle row still holds it,
        # since more layouts divide n rows than n - 1.
        return Arrangement(
            order,
            groups.clamp(min=0),
            num_content=count - 1 + first,
            first_asked=first,
            num_given=self.prefix,
            num_idle=first,
            predicts_all=isinstance(prefix, int) and prefix == first == 0,
        )

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return the arrangement of a user's order and prefix; by default those of training.

        The choices are `order`, int64 `[b or 1, n]`, and, if prefixes are drawn, `prefix`, the
        number of given tokens of all images.

        Raises:
            UserError: the order is not a permutation, or the prefix leaves nothing to predict.
        """
        order: Tensor | None = choices.get("order")
        prefix: int | Tensor = choices.get("prefix", self._prefix_of(index))
        count = self.orders.num_positions
        if "prefix" in choices and not (isinstance(prefix, Integral) and 0 < prefix < count):
            raise UserError(f"prefix must be a whole number from 1 to {count - 1}, not {prefix}")
        if order is None:
            order = self.orders.of(index)
        else:
            check_order(order, count, len(index))
        return self._arranged(order.to(index.device), prefix)

    def for_features(self, index: Tensor) -> Arrangement:
        """Return the order that all images share; if prefixes are drawn, all of it is prefix."""
        order = self.orders.shared(index.device)
        return self._arranged(order, order.shape[1] if self.draws_prefix else self.prefix)

    def order_of(self, images: Tensor, *, seed: int) -> Tensor:
        """Return the orders that images with these indices have in training."""
        return self.orders.of(images)

    def first(self, order: Tensor, *, num_given: int, options: Any) -> Step | None:
        """Predict the first position that is not given; raise UserError if it is in the prefix.

        Where prefixes are drawn, all given tokens are the prefix.
        """
        if num_given < self.prefix and self.draws_prefix:
            raise UserError("this model was trained with a prefix: give at least one token, not 0")
        if num_given < self.prefix:
            raise UserError(
                f"this model was trained with a prefix of {self.prefix} tokens: give as many, not"
                f" {num_given}"
            )
        prefix = num_given if self.draws_prefix else self.prefix
        return self._step(self._arranged(order, prefix), num_given, 0, num_given, options)

    def after(self, step: Step, progress: GenerationProgress, options: Any) -> Step | None:
        """Predict the next position, or several."""
        return self._step(
            step.arrangement, step.asked.stop, step.number + 1, step.num_given, options
        )

    def _step(
        self, arrangement: Arrangement, position: int, number: int, num_given: int, options: Any
    ) -> Step | None:
        if position == arrangement.num_positions:
            return None
        asked = slice(position, position + 1)
        if not self.samples_one(options):
            done, count = position - num_given, arrangement.num_positions - num_given
            asked = slice(position, position + options.num_asked(number, done, count))
        # All steps have one name: the position distinguishes their draws (`SamplingKeys`), so that
        # they can be made for many positions at once.
        return Step(arrangement, position, asked, number, "token", num_given=num_given)
