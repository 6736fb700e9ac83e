"""MaskGIT's way of sampling: all tokens at once, of which the surest stay, in a few rounds.

"GIVT: Generative Infinite-Vocabulary Transformers", section 4.1, after "MaskGIT" (Chang et al.,
2022): after round i of T, the share cos(π/2 · i/T) of the tokens is hidden again, those of the
lowest confidence: log-likelihood + t_C · (1 - i/T) · Gumbel noise, t_C the choice temperature.

Legend: b images, n tokens, d numbers of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.random import uniform

Propose = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""From tokens `[b, n, d]`, bool `[b, n]` true where hidden, and the number of the round: tokens
drawn for all places `[b, n, d]` and their log-likelihood `[b, n]`."""


@dataclass(frozen=True)
class MaskGITSchedule:
    """How many rounds, and how much chance decides what stays.

    Raises:
        UserError: when a value is out of its range.
    """

    num_steps: int = 16
    choice_temperature: float = 35.0
    """t_C: 35 for 256² pixels without guidance, 60 with (table 1), 140 for 512² (figure 18)."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise UserError(f"the number of steps must be 1 or more, not {self.num_steps}")
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
            share = math.cos(math.pi / 2 * (number + 1) / self.num_steps)
            # The last cosine is not exactly 0 in floating point, but its floor is.
            hidden = max(0, min(hidden - 1, math.floor(share * num_tokens)))
        return hidden


@torch.no_grad()
def uncover(
    propose: Propose,
    images: Tensor,
    *,
    num_tokens: int,
    token_size: int,
    schedule: MaskGITSchedule,
    seed: int,
    report: Callable[[Tensor], None] = lambda tokens: None,
) -> Tensor:
    """Draw images from nothing.

    Args:
        propose: runs the model and draws.
        images: int64 `[b]`, numbers of the images, which with `seed` decide every draw.
        num_tokens: n.
        token_size: d.
        schedule: rounds and choice temperature.
        seed: decides every draw.
        report: called with all tokens as drawn in each round, hidden ones too (figure 15).

    Returns:
        float32 `[b, n, d]`.
    """
    shape = (len(images), num_tokens)
    tokens = torch.zeros(*shape, token_size, device=images.device)
    hidden = torch.ones(shape, dtype=torch.bool, device=images.device)
    for step in range(schedule.num_steps):
        if not schedule.num_hidden(step - 1, num_tokens):
            break
        drawn, likelihood = propose(tokens, hidden, step)
        tokens = torch.where(hidden[..., None], drawn, tokens)
        report(tokens)
        heat = schedule.choice_temperature * (1.0 - (step + 1) / schedule.num_steps)
        draws = uniform(images, num_tokens, seed=seed, purpose=f"choice/{step}")
        confidence = likelihood.float() + heat * _gumbel(draws)
        confidence = confidence.masked_fill(~hidden, float("inf"))
        hidden = lowest(confidence, schedule.num_hidden(step, num_tokens))
        tokens = tokens.masked_fill(hidden[..., None], 0.0)
    return tokens


def lowest(confidence: Tensor, count: int) -> Tensor:
    """Return bool `[b, n]`, true at the `count` lowest of each row of `[b, n]`."""
    places = confidence.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, places, True)


def _gumbel(draws: Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1) into Gumbel noise."""
    # Half a unit of the 24 bits: neither logarithm may be of 0.
    return -torch.log(-torch.log(draws.double() + 2.0**-25)).float()
