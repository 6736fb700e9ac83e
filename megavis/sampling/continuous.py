"""Real-valued tokens one after the other, with the keys and values of earlier places kept.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.4. With guidance each image runs
twice in one batch, with its class and without. Beam search keeps the likeliest sequences of each
image; at every place but the first it draws several candidates for each.

Legend: b images, n tokens, d numbers of a token, B beams, F fans, p places given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.model.runner import Runner
from megavis.objectives.real_tokens import OneByOne
from megavis.sampling.autoregressive import without_sequence_parallelism
from megavis.sampling.densities import TokenChoice
from megavis.sampling.guidance import Acceptance


@torch.no_grad()
def generate_tokens(
    runner: Runner,
    objective: OneByOne,
    rows: Tensor,
    images: Tensor,
    *,
    choice: TokenChoice,
    seed: int,
    acceptance: Acceptance,
    prefix: Tensor | None = None,
    memory: Tensor | None = None,
    cached: bool = True,
) -> Tensor:
    """Draw images; every process of the job calls this together.

    Args:
        runner: the model, in any layout.
        objective: the paper.
        rows: int64 `[b]`, rows of the labels, see the objective's `label_rows`.
        images: int64 `[b]`, numbers of the images, which with `seed` decide every draw.
        choice: what is done to densities.
        seed: decides every draw.
        acceptance: counts of guidance are added to it.
        prefix: the first tokens `[b, p, d]`, where they are given.
        memory: what an encoder made of an image for each, `[b, c, h]`, where there is one.
        cached: keep keys and values; without, all places run again for each (to compare with).

    Returns:
        float32 `[b, n, d]`, in the space of the adapter where there is one.
    """
    beams = _Beams.start(images, choice, objective.num_tokens, objective.token_size)
    times = 2 if choice.guidance else 1
    rows = rows.repeat_interleave(choice.num_beams)
    if choice.guidance:
        rows = torch.cat([rows, torch.full_like(rows, objective.null_row)])
    seen: tuple[Tensor, ...] = ()
    if memory is not None:
        seen = (memory.repeat_interleave(choice.num_beams, dim=0).repeat(times, 1, 1),)
    given = 0 if prefix is None else prefix.shape[1]
    if prefix is not None:
        beams.tokens[:, :given] = prefix.repeat_interleave(choice.num_beams, dim=0)
    cache = runner.cache(objective.num_tokens, num_sequences=len(rows)) if cached else None
    with without_sequence_parallelism(runner.layers):
        for place in range(given, objective.num_tokens):
            tokens = torch.cat([beams.tokens] * times)
            start = 0 if cache is None else cache.length
            inputs = (*objective.inputs_at(tokens, rows, start, place + 1), *seen)
            predictions = runner.predictions(inputs, cache=cache)
            parameters = objective.parameters(predictions)[:, -1]
            order = beams.extend(objective, parameters, place, seed, acceptance)
            if order is not None and cache is not None:
                cache.select(order)
    return beams.best()


@dataclass
class _Beams:
    """The sequences of all images so far: `[b · B, n, d]`, the beams of an image together."""

    tokens: Tensor
    images: Tensor
    log_prob: Tensor
    """`[b, B]`, of all tokens so far."""
    choice: TokenChoice

    @classmethod
    def start(cls, images: Tensor, choice: TokenChoice, count: int, size: int) -> _Beams:
        tokens = torch.zeros(len(images) * choice.num_beams, count, size, device=images.device)
        log_prob = torch.zeros(len(images), choice.num_beams, device=images.device)
        return cls(tokens, images, log_prob, choice)

    def extend(
        self,
        objective: OneByOne,
        parameters: Tensor,
        place: int,
        seed: int,
        acceptance: Acceptance,
    ) -> Tensor | None:
        """Draw the token of a place; return which of the old sequences each new one goes on."""
        choice = self.choice
        # At the first place all beams of an image predict alike: one candidate each.
        fans = choice.num_fans if place else 1
        halves = parameters.chunk(2) if choice.guidance else (parameters,)
        densities = [objective.density(half.repeat_interleave(fans, dim=0)) for half in halves]
        drawn, log_prob = choice.draw(
            densities,
            self._keys(fans),
            seed=seed,
            purpose=f"token/{place}",
            acceptance=acceptance,
        )
        if not choice.searches:
            self.tokens[:, place] = drawn
            return None
        total = self.log_prob.repeat_interleave(fans, dim=1) + log_prob.view(len(self.images), -1)
        self.log_prob, kept = total.topk(choice.num_beams, dim=1)
        first = torch.arange(len(self.images), device=kept.device)[:, None]
        order = (first * choice.num_beams + kept // fans).flatten()
        self.tokens = self.tokens[order]
        self.tokens[:, place] = drawn[(first * choice.num_beams * fans + kept).flatten()]
        return order

    def _keys(self, fans: int) -> Tensor:
        """Return a number for each candidate; that of its image where nothing is searched."""
        count = self.choice.num_beams * fans
        candidates = torch.arange(count, device=self.images.device)
        return (self.images[:, None] * count + candidates).flatten()

    def best(self) -> Tensor:
        """Return the likeliest sequence of each image, which stands first."""
        return self.tokens[:: self.choice.num_beams]
