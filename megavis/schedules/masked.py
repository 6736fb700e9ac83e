"""Masked prediction: random tokens are predicted from the others.

`Masked` masks each token independently with the same probability, as in BERT, or the same number
of tokens in every image ("SimMIM: a Simple Framework for Masked Image Modeling", Xie et al., 2022).
`Rounds` draws the mask ratio of each image and generates in rounds ("MaskGIT: Masked Generative
Image Transformer", Chang et al., 2022): after round i of T, a share cos(π/2 · i/T) of the tokens is
masked again, the least confident first; confidence is log-likelihood + t_C · (1 - i/T) · Gumbel
noise with the choice temperature t_C. `Context` has a context of fixed size, which predicts the
other tokens, or all.

Legend: b images, n tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.section import LossAverage
from megavis.grammar.boundaries import context_size
from megavis.parallel.random import uniform
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.hidden_tokens import HiddenTokens, random_ranks
from megavis.schedules.orders import random_orders
from megavis.schedules.schedule import Arrangement, GenerationProgress, Schedule, Step


class Hiding(Schedule):
    """Hidden tokens are group 1, the others group 0; all positions are inputs, in raster order.

    Args:
        num_tokens: tokens n of an image.
        seed: the run's seed; the mask is a function of seed and sample.
    """

    takes_given = False
    is_random = True
    names = ("mask",)

    def __init__(self, num_tokens: int, *, seed: int) -> None:
        self.num_tokens, self.seed = num_tokens, seed

    @property
    def given_share(self) -> float:
        """Zero: generation begins with all tokens hidden."""
        return 0.0

    def draw(self, index: Tensor) -> Arrangement:
        """Draw the masks of samples `[b]`."""
        return self.hiding(self.draw_hidden(index))

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Apply `mask`, bool `[b, n]` in raster order, true where a token is masked.

        Defaults to the training mask of the given samples; if none are given, to the mask that
        features use for sample 0.
        """
        mask: Tensor | None = choices.get("mask")
        if mask is None:
            return self.draw(index) if is_named else self.for_features(torch.zeros_like(index))
        shape = (len(index), self.num_tokens)
        if mask.shape != shape or mask.dtype != torch.bool:
            raise UserError(
                f"the mask has shape {list(mask.shape)} and type {mask.dtype}; this run expects"
                f" bool {list(shape)}"
            )
        return self.hiding(mask.to(index.device))

    @abstractmethod
    def draw_hidden(self, index: Tensor) -> Tensor:
        """Return the mask of samples `[b]`: bool `[b, n]` in raster order, true where masked."""

    def hiding(self, hidden: Tensor) -> Arrangement:
        """Return the arrangement of a mask, bool `[b or 1, n]` in raster order."""
        order = torch.arange(self.num_tokens, device=hidden.device)[None]
        return Arrangement(order, hidden.long(), num_content=self.num_tokens)

    def for_features(self, index: Tensor) -> Arrangement:
        """Mask nothing."""
        return self.hiding(torch.zeros(1, self.num_tokens, dtype=torch.bool, device=index.device))


class Masked(Hiding):
    """Mask random tokens.

    Args:
        share: the probability with which a token is masked, independently of the others.
        hidden: mask these tokens instead, the same number in every image.
        masks_features: mask tokens for features too, as in training.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        share: float,
        hidden: HiddenTokens | None = None,
        masks_features: bool,
        seed: int,
    ) -> None:
        super().__init__(num_tokens, seed=seed)
        self.share, self.hidden, self.masks_features = share, hidden, masks_features

    @property
    def has_random_features(self) -> bool:
        """True if features are of drawn masks."""
        return self.masks_features

    def draw_hidden(self, index: Tensor) -> Tensor:
        """See `Hiding`."""
        if self.hidden is None:
            return uniform(index, self.num_tokens, seed=self.seed, purpose="bert-mask") < self.share
        return self.hidden.ranks(index, seed=self.seed) < self.hidden.count

    def for_features(self, index: Tensor) -> Arrangement:
        """Mask nothing, or as in training."""
        return self.draw(index) if self.masks_features else super().for_features(index)


@dataclass(frozen=True)
class CosineRounds:
    """Rounds of generation. Raises UserError: there are none."""

    rounds: int
    """Forward passes per image, 1 or more."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"the number of rounds must be 1 or more, not {self.rounds}")

    def num_hidden(self, step: int, num_tokens: int) -> int:
        """Return the number of tokens still masked after round `step`, counted from 0.

        Every round unmasks at least one token while any is masked.
        """
        hidden = num_tokens
        for number in range(step + 1):
            share = math.cos(math.pi / 2 * (number + 1) / self.rounds)
            # The last cosine is not exactly 0 in floating point, but its floor is.
            hidden = max(0, min(hidden - 1, math.floor(share * num_tokens)))
        return hidden


@dataclass(frozen=True)
class RoundOptions(CosineRounds):
    """Options of generation in rounds, of densities. Raises UserError: a value is out of range."""

    rounds: int = 16
    """Forward passes per image, 1 or more."""
    choice_temperature: float = 35.0
    """t_C, 0 or more. GIVT uses 35 for 256² pixels without guidance and 60 with it (table 1), and
    140 for 512² (figure 18)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.choice_temperature >= 0:
            raise UserError(
                f"the choice temperature must be 0 or more, not {self.choice_temperature}"
            )


@dataclass(frozen=True)
class IdRoundOptions(RoundOptions):
    """Options of generation in rounds, of ids, whose likelihoods vary less."""

    choice_temperature: float = 4.5
    """t_C, 0 or more; 4.5 as in MaskGIT's released configs (`sample_choice_temperature`)."""


class Rounds(Hiding):
    """Mask a share of the tokens that is drawn for each image.

    Args:
        share: the distribution of the share.
        loss_average: `batch`: all masked tokens weigh the same; `images`: all images do.
        of_ids: tokens are ids; otherwise their likelihoods are densities.
    """

    needs_score = True

    def __init__(
        self,
        num_tokens: int,
        *,
        share: HiddenShare,
        loss_average: LossAverage,
        of_ids: bool = False,
        seed: int,
    ) -> None:
        super().__init__(num_tokens, seed=seed)
        self.options_type = IdRoundOptions if of_ids else RoundOptions
        self.share, self.loss_average = share, loss_average

    def draw_hidden(self, index: Tensor) -> Tensor:
        """See `Hiding`."""
        ranks = random_ranks(index, self.num_tokens, seed=self.seed)
        return ranks < self.num_predicted(index)[:, None]

    def num_predicted(self, index: Tensor) -> Tensor:
        """Return the number of masked tokens of samples `[b]`: float32 `[b]`."""
        return self.share.drawn(index, seed=self.seed)

    @cached_property
    def expected_predicted(self) -> float:
        """The expectation of `num_predicted`."""
        return self.share.mean

    def order_of(self, images: Tensor, *, seed: int) -> Tensor:
        """Return raster order, of all images: int64 `[1, n]`."""
        return torch.arange(self.num_tokens, device=images.device)[None]

    def first(self, order: Tensor, *, num_given: int, options: RoundOptions) -> Step:
        """Mask all tokens and predict all."""
        hidden = torch.ones_like(order, dtype=torch.bool)
        arrangement = Arrangement(order, hidden.long(), num_content=self.num_tokens)
        return Step(arrangement, 0, slice(0, self.num_tokens), 0, "round/0", hidden=hidden)

    def share_done(self, step: Step, options: RoundOptions) -> float:
        """Return the share of the rounds before a step."""
        return step.number / options.rounds

    def after(self, step: Step, progress: GenerationProgress, options: RoundOptions) -> Step | None:
        """Mask the least confident of the sampled tokens again."""
        assert step.hidden is not None
        assert progress.score is not None
        count, number = step.arrangement.num_positions, step.number
        left = options.num_hidden(number, count)
        if not left:
            return None
        heat = options.choice_temperature * (1.0 - (number + 1) / options.rounds)
        draws = uniform(progress.images, count, seed=progress.seed, purpose=f"choice/{number}")
        confidence = progress.score.float() + heat * _gumbel(draws)
        # Tokens that an earlier round has fixed stay.
        confidence = confidence.masked_fill(~step.hidden, float("inf"))
        hidden = lowest(confidence, left)
        arrangement = replace(step.arrangement, groups=hidden.long())
        return Step(arrangement, 0, step.asked, number + 1, f"round/{number + 1}", hidden=hidden)


def lowest(confidence: Tensor, count: int) -> Tensor:
    """Return bool `[b, n]`, true at the `count` lowest values of each row of `[b, n]`."""
    # By rank in a stable sort: with a threshold, ties would change the number of hidden tokens.
    places = confidence.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, places, True)


def _gumbel(draws: Tensor) -> Tensor:
    """Turn uniform draws in [0, 1) into Gumbel noise."""
    # Add half of the draws' resolution of 2^-24, so that neither logarithm is of 0.
    return -torch.log(-torch.log(draws.double() + 2.0**-25)).float()


class Context(Schedule):
    """The first positions of a random order are the context; predict the others, or all tokens.

    Args:
        mask_ratio: η in [0, 1), the share of the tokens outside the context.
        hidden: which tokens are outside at this η; random ones without it.
        placed_ratio: share of the tokens, at the start of the context, that get their position.
        asks_context: predict the tokens of the context too.
        seed: the run's seed; the order is a function of seed and sample.
    """

    def __init__(
        self,
        num_positions: int,
        *,
        mask_ratio: float,
        hidden: HiddenTokens | None = None,
        placed_ratio: float = 0.0,
        asks_context: bool = True,
        seed: int,
    ) -> None:
        self.asks_context, self.hidden = asks_context, hidden
        self.num_positions, self.mask_ratio, self.seed = num_positions, mask_ratio, seed
        self.num_placed = round(placed_ratio * num_positions)
        # Also where all tokens are context: the head reads as many rows as in training.
        self.first_asked = 0 if asks_context else context_size(num_positions, mask_ratio)

    @property
    def is_random(self) -> bool:
        """True if the context, or the tokens that get their position, are drawn."""
        return self.num_context(self.mask_ratio) < self.num_positions or self.num_placed > 0

    def num_context(self, mask_ratio: float) -> int:
        """Return the number of context tokens: a share of 1 - η, and at least one."""
        return context_size(self.num_positions, mask_ratio)

    def draw(self, index: Tensor, mask_ratio: float | None = None) -> Arrangement:
        """Draw the context of samples `[b]`; η defaults to its value in training."""
        count = self.num_context(self.mask_ratio if mask_ratio is None else mask_ratio)
        if self.hidden is None:
            order = random_orders(index, self.num_positions, seed=self.seed, purpose="context")
        else:
            hidden = self.hidden.with_count(self.num_positions - count)
            order = hidden.ranks(index, seed=self.seed).argsort(dim=1, descending=True)
        return self._arranged(order, count, self.num_placed)

    @property
    def names(self) -> tuple[str, ...]:
        """The mask ratio, unless it determines the number of predicted tokens."""
        return ("mask_ratio",) if self.asks_context else ()

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Draw the context with η = `mask_ratio`, by default its value in training.

        If neither samples nor η are given, all tokens are context, as for features.
        """
        ratio: float | None = choices.get("mask_ratio")
        if ratio is None and not is_named:
            return self.for_features(index)
        if ratio is not None and not (isinstance(ratio, Real) and 0 <= ratio <= 1):
            raise UserError(f"mask_ratio must be in [0, 1], not {ratio}")
        return self.draw(index, ratio)

    def for_features(self, index: Tensor) -> Arrangement:
        """Make all tokens context, each with its position."""
        order = torch.arange(self.num_positions, device=index.device).expand(len(index), -1)
        # All tokens are placed, so none counts as predicted.
        return self._arranged(order, self.num_positions, self.num_positions)

    def _arranged(self, order: Tensor, num_context: int, num_placed: int) -> Arrangement:
        positions = torch.arange(self.num_positions, device=order.device)
        # Tokens whose position is given are group 0, which the loss ignores.
        asked = (positions >= num_placed).long()[None]
        return Arrangement(
            order,
            asked,
            num_content=num_context,
            first_asked=self.first_asked,
            num_placed=num_placed,
            predicts_all=num_placed == 0,
        )
