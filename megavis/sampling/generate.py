"""The generation loop of every model.

The schedule selects the positions of each step, the model turns the known tokens into its
inputs, and the density samples instead of the head. Draws are functions of seed, image and step,
so every process in every layout samples the same tokens.

Legend: b images, B beams, F candidates per beam, r rows (b · B, doubled with guidance), n
positions, q of them sampled in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.condition import Known
from megavis.composition.model import Model
from megavis.densities.density import Samples, SamplingKeys, TokenSampler
from megavis.model.inference import Inference
from megavis.model.kernels import decoding_kernels
from megavis.model.layer_state import PackedState
from megavis.model.stack import Predictions
from megavis.model.visibility import KeyValueCache
from megavis.schedules.schedule import GenerationProgress, Schedule, Step


@dataclass(frozen=True)
class GenerationSettings:
    """Validated options of generation.

    Attributes:
        beams: sequences that beam search keeps per image, B.
        fans: candidates that it samples per beam, F.
        seed: draws are functions of seed and image index.
    """

    token_sampler: TokenSampler
    schedule: Any
    beams: int = 1
    fans: int = 1
    seed: int = 0

    @property
    def searches(self) -> bool:
        """True for beam search."""
        return max(self.beams, self.fans) > 1


@torch.no_grad()
def generate_in_steps(
    inference: Inference,
    model: Model,
    images: Tensor,
    *,
    settings: GenerationSettings,
    order: Tensor,
    known: Known = (),
    given: Tensor | None = None,
    cached: bool = True,
    static: bool | None = None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Generate images step by step; collective over all processes of the job.

    Args:
        images: int64 `[b]`, indices of the images, on the model's device.
        order: int64 `[b or 1, n]`, the order of generation.
        known: the condition, one row per image.
        given: the first tokens `[b, p, ...]` in the order.
        cached: use a KV cache if the model allows; else every step runs all positions.
        static: run cached steps as CUDA graphs on a GPU (`static_step.py`); None: on GPUs only.

    Yields:
        After each step, the tokens `[b, n, ...]` in the order of generation and as the model
        predicts them, and the counts of rejection sampling.
    """
    token_sampler, schedule = settings.token_sampler, model.schedule
    num_given = 0 if given is None else given.shape[1]
    lanes = _Lanes.start(model.reads.blank(images), images, given, settings)
    known = model.prepare(known, inference.once)  # before it is repeated: once for an image
    known = lanes.spread_known(known, model)
    step = schedule.first(order, num_given=num_given, options=settings.schedule)
    cached = cached and model.keeps_keys
    cache = inference.cache(model.num_cached, static=static) if cached else None
    if step is None:
        yield lanes.best(), None
    with inference.evaluating():
        while step is not None:
            since = 0 if cache is None else cache.length
            rows = model.rows(lanes.repeated(), lanes.spread_step(step), known, since)
            draws = lanes.draws(step, schedule)

            def finish(
                head: nn.Module, state: PackedState, draws: SamplingKeys = draws
            ) -> Predictions:
                return token_sampler(head, state, draws).pack()

            with decoding_kernels(images.device):
                made = inference.predictions(
                    rows, cache=cache, finish=finish, whole=True, phase="step"
                )
            drawn = Samples.unpack(made)
            moved = lanes.write(step, drawn)
            if cache is not None:
                _follow(cache, moved, model.asks.num_final(step))
            progress = GenerationProgress(drawn.score, images, settings.seed)
            step = schedule.after(step, progress, settings.schedule)
            yield lanes.best(), drawn.counts


def _follow(cache: KeyValueCache, moved: Tensor | None, final: int | None) -> None:
    """Reorder sequences as they `moved`, and forget rows after the `final` ones."""
    if moved is not None:
        cache.select(moved)
    if final is not None:
        cache.keep(final)


@dataclass
class _Lanes:
    """The sequences generated so far; the beams of an image are adjacent."""

    tokens: Tensor
    """`[b · B, n, ...]`."""
    images: Tensor
    log_prob: Tensor
    """`[b, B]`, log-likelihood of all tokens so far."""
    settings: GenerationSettings
    last_draws: SamplingKeys | None = None

    @classmethod
    def start(
        cls, blank: Tensor, images: Tensor, given: Tensor | None, settings: GenerationSettings
    ) -> _Lanes:
        tokens = blank.repeat_interleave(settings.beams, dim=0)
        if given is not None:
            tokens[:, : given.shape[1]] = given.repeat_interleave(settings.beams, dim=0)
        log_prob = torch.zeros(len(images), settings.beams, device=images.device)
        return cls(tokens, images, log_prob, settings)

    def repeated(self) -> Tensor:
        """Return the tokens of all rows."""
        lanes = self.settings.token_sampler.num_lanes
        return self.tokens if lanes == 1 else torch.cat([self.tokens] * lanes)

    def _spread(self, rows: Tensor) -> Tensor:
        """Repeat rows `[b, ...]` of images for all rows of the model, unless images share one."""
        if len(rows) == 1 and len(self.images) > 1:
            return rows
        rows = rows.repeat_interleave(self.settings.beams, dim=0)
        lanes = self.settings.token_sampler.num_lanes
        return rows if lanes == 1 else torch.cat([rows] * lanes)

    def spread_known(self, known: Known, model: Model) -> Known:
        """Repeat the condition for all rows; with guidance the second half is unconditional."""
        known = tuple(part.repeat_interleave(self.settings.beams, dim=0) for part in known)
        if self.settings.token_sampler.num_lanes == 1:
            return known
        return tuple(map(torch.cat, zip(known, model.condition.null(known), strict=True)))

    def spread_step(self, step: Step) -> Step:
        """Repeat a step's tensors for all rows."""
        if self.settings.beams * self.settings.token_sampler.num_lanes == 1:
            return step
        arrangement = replace(
            step.arrangement,
            order=self._spread(step.arrangement.order),
            groups=self._spread(step.arrangement.groups),
        )
        hidden = None if step.hidden is None else self._spread(step.hidden)
        return replace(step, arrangement=arrangement, hidden=hidden)

    def _num_fans(self, step: Step) -> int:
        # Before the first step all beams of an image are equal, so each samples one candidate.
        return self.settings.fans if step.number else 1

    def draws(self, step: Step, schedule: Schedule) -> SamplingKeys:
        """Return the random draws of a step, with a key for each token to sample."""
        share_done = schedule.share_done(step, self.settings.schedule)
        share_known = schedule.share_known(step, self.settings.schedule)
        count = self.settings.beams * self._num_fans(step)
        shape, last = (len(self.images) * count, step.num_asked), self.last_draws
        if step.num_asked == 1 and last is not None and last.keys.shape == shape:
            self.last_draws = last.moved(step.name, step.asked.start, share_done, share_known)
        else:
            self.last_draws = SamplingKeys(
                self._keys(step, count),
                self.settings.seed,
                step.name,
                step.asked.start,
                share_done,
                share_known,
            )
        return self.last_draws

    def _keys(self, step: Step, count: int) -> Tensor:
        """Return the keys of `count` candidates per image, the same at all single positions."""
        candidates = torch.arange(count, device=self.images.device)
        # By image, not by row of this batch: samples do not depend on the batch.
        keys = (self.images[:, None] * count + candidates).flatten()[:, None]
        if step.num_asked == 1:
            return keys
        asked = torch.arange(step.asked.start, step.asked.stop, device=keys.device)
        return keys * step.arrangement.num_positions + asked

    def write(self, step: Step, drawn: Samples) -> Tensor | None:
        """Store the sampled tokens; in beam search, return the old sequence of each new one."""
        if step.hidden is not None:
            hidden = step.hidden.view(*step.hidden.shape, *[1] * (self.tokens.ndim - 2))
            self.tokens = torch.where(hidden, drawn.tokens, self.tokens)
            return None
        if not self.settings.searches:
            self.tokens[:, step.asked] = drawn.tokens
            return None
        assert drawn.score is not None
        fans, beams = self._num_fans(step), self.settings.beams
        total = self.log_prob.repeat_interleave(fans, dim=1)
        total = total + drawn.score.view(len(self.images), -1)
        self.log_prob, kept = total.topk(beams, dim=1)
        first = torch.arange(len(self.images), device=kept.device)[:, None]
        # Candidates of a beam are adjacent, beams of an image too (`_keys`, `for_each_key`).
        order = (first * beams + kept // fans).flatten()
        self.tokens = self.tokens[order]
        self.tokens[:, step.asked] = drawn.tokens[(first * beams * fans + kept).flatten()]
        return order

    def best(self) -> Tensor:
        """Return the most likely sequence of each image, which is its first beam."""
        beams = self.settings.beams
        # `topk` has sorted the beams of an image.
        return self.tokens if beams == 1 else self.tokens[::beams]
