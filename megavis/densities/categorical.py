"""Categorical densities: ids of a vocabulary, or positions of the grid with one logit each.

Ids are sampled with guidance, temperature, top-k and top-p.

Legend: b images, q predicted positions, m ids to sample, v vocabulary size, n tokens and positions
of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.density import (
    Density,
    Samples,
    SamplingKeys,
    TokenSampler,
    check_guidance_schedule,
    check_not_negative,
    for_each_key,
)
from megavis.model.core import Core
from megavis.model.heads import (
    Head,
    VocabularyHead,
    predicting,
    split_cross_entropy,
    whole_logits,
)
from megavis.model.kernels import cross_entropy
from megavis.model.layer_state import PackedState
from megavis.model.parameters import Fill


@dataclass(frozen=True)
class CategoricalOptions:
    """Sampling options of ids, in the order of use; raise UserError if out of range."""

    temperature: float = 1.0
    """Divides the logits, 0 or more; 0 takes the argmax."""
    top_k: int | None = None
    """Keep only the `top_k` most likely ids, 1 or more."""
    top_p: float | None = None
    """Keep the smallest set of most likely ids whose probabilities sum to `top_p`, in (0, 1]."""
    guidance: float = 0.0
    """w of classifier-free guidance, 0 or more: logits are (1 + w) · l - w · l', where l' is
    predicted without a class. Other papers call 1 + w the guidance scale."""
    guidance_power: float | None = None
    """Increase w from 0 with the share s of sampled tokens, multiplying it by
    (1 - cos(π · s^power)) / 2, as in "Randomized Autoregressive Visual Generation" and "Masked
    Diffusion Transformer is a Strong Image Synthesizer"; None: w is constant."""
    guidance_schedule: str | None = None
    """`constant` (None), or `linear`: w times that share, as in the released code of "RandAR:
    Decoder-only Autoregressive Visual Generation in Random Orders"."""

    def __post_init__(self) -> None:
        check_not_negative(temperature=self.temperature, guidance=self.guidance)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k must be 1 or more, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p must lie in (0, 1], not {self.top_p}")
        power = self.guidance_power
        if power is not None and not 0 <= power < float("inf"):
            raise UserError(f"the power of the guidance must be 0 or more, not {power}")
        if power is not None and not self.guidance:
            raise UserError("the power of the guidance needs a guidance above 0")
        check_guidance_schedule(self.guidance_schedule, self.guidance)
        if power is not None and self.guidance_schedule is not None:
            raise UserError("guidance must grow by a power or by a schedule, not by both")

    def guided(self, logits: Tensor, share_done: float) -> Tensor:
        """Combine logits of both halves of the rows, with and without a class, `[2 · r, q, v]`.

        Returns float32 `[r, q, v]`: rounded to bf16 once more, probabilities change by a tenth.
        """
        given, free = logits.float().chunk(2)
        weight = self.guidance * (share_done if self.guidance_schedule == "linear" else 1.0)
        if self.guidance_power is not None:
            weight *= (1.0 - math.cos(math.pi * share_done**self.guidance_power)) / 2.0
        return given + weight * (given - free)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each id after all filters: `[m, v]` for logits `[m, v]`.

        Ties are broken in favour of the lower id. Computed in float64, so that cumulative sums over
        the vocabulary lose no id to rounding.
        """
        wide = logits.double()
        if self.temperature > 0:
            wide = wide / self.temperature
            if self.top_k is None and self.top_p is None:
                return wide.softmax(dim=1)
        ordered, ids = wide.sort(dim=1, descending=True, stable=True)
        # At temperature 0 the filter keeps only the first id.
        likely = self._filter(ordered.softmax(dim=1))
        return torch.zeros_like(likely).scatter_(1, ids, likely)

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Sample ids int64 `[m]` of logits `[m, v]`, by inversion at `uniforms` `[m]` in [0, 1)."""
        if self.temperature == 0:
            return logits.argmax(dim=1)
        cumulative = self.probabilities(logits).cumsum(dim=1)
        # Scale by the computed sum, so that the threshold stays below it and an id is found.
        threshold = uniforms.double()[:, None] * cumulative[:, -1:]
        return (cumulative <= threshold).sum(dim=1)

    def _filter(self, descending: Tensor) -> Tensor:
        """Apply top-k and top-p to probabilities `[m, v]` in descending order; renormalise."""
        kept = descending.clone()
        top_k = 1 if self.temperature == 0 else self.top_k
        if top_k is not None:
            kept[:, top_k:] = 0.0
            # Renormalise before top-p, so that it applies to the probability left by top-k, as in
            # `transformers`.
            kept /= kept.sum(dim=1, keepdim=True)
        if self.top_p is not None:
            # Keep an id if those before it sum to less than p, so the first is always kept.
            before = kept.cumsum(dim=1) - kept
            kept[before >= self.top_p] = 0.0
        return kept / kept.sum(dim=1, keepdim=True)


class Categorical(Density):
    """Categorical distribution over a vocabulary, whose logits are split over the tensor group.

    Args:
        has_bias: whether logits have a bias.
        num_skipped: leading rows that predict nothing.
    """

    options_type = CategoricalOptions

    def __init__(
        self,
        core: Core,
        vocabulary_size: int,
        *,
        fill: Fill,
        has_bias: bool = False,
        num_skipped: int = 0,
    ) -> None:
        build = partial(VocabularyHead, core, vocabulary_size, fill, has_bias=has_bias)
        super().__init__(vocabulary_size, build)
        self.core, self.num_skipped = core, num_skipped

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token in nats, `[b, q]`, for ids int64 `[b, q]`.

        Predictions are this process's logits `[num_skipped + q, b, v / tensor size]`, or those of
        its own rows.
        """
        # Pad targets rather than cut logits: with context parallelism, some process holds the
        # skipped rows.
        rows = F.pad(targets, (self.num_skipped, 0))
        losses = split_cross_entropy(predictions, rows.t().contiguous(), self.core).t()
        return losses[:, self.num_skipped :]

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return logits `[b, q, v]`."""
        return predicting(whole_logits(predictions, self.core), self.num_skipped)

    def token_sampler(self, options: CategoricalOptions, *, scored: bool) -> TokenSampler:
        """Return a sampler of ids."""
        return _CategoricalSampling(self, options, scored)


@dataclass(frozen=True)
class _CategoricalSampling(TokenSampler):
    density: Categorical
    choice: CategoricalOptions
    scored: bool

    @property
    def num_lanes(self) -> int:
        """Two with guidance."""
        return 2 if self.choice.guidance else 1

    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        shape = draws.keys.shape
        # The last rows: without a cache a step computes all of them.
        logits = self.density.outputs(head(state))[:, -shape[1] :]
        if self.num_lanes > 1:
            logits = self.choice.guided(logits, draws.share_done)
        logits = for_each_key(logits, draws).flatten(0, 1)
        ids = self.choice.draw(logits, draws.uniform_of_position())
        score = None
        if self.scored:
            # Score before temperature and filters, which change the draw but not the likelihood.
            likely = logits.float().log_softmax(1)
            score = likely.gather(1, ids[:, None]).view(shape)
        return Samples(ids.view(shape), score)


class Place(Density):
    """Cross-entropy over the positions of the grid.

    Args:
        build_head: builds the last layer, which returns `[b, n, n]`.
    """

    def __init__(self, num_places: int, *, build_head: Callable[[], Head]) -> None:
        super().__init__(num_places, build_head)

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the true positions int64 `[b, n]` of tokens in raster order."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return places.expand(len(tokens), -1), ()

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token in nats, `[b, n]`, for int64 `[b, n]`."""
        # Classes last, not `[b, classes, n]`: that layout has no deterministic kernel on a GPU.
        return cross_entropy(predictions, targets)

    @property
    def measures_accuracy(self) -> bool:
        """True: the accuracy of positions."""
        return True

    def measures(
        self, predictions: Tensor, targets: tuple[Tensor, ...]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return top-1 and top-5 accuracy as `accuracy` and `top5`, as sums and counts.

        Tokens of weight 0, whose positions are given, are not counted.
        """
        true, *weights = targets
        likeliest = predictions.topk(min(5, self.num_outputs), dim=-1).indices
        hits = (likeliest == true[..., None]).float()
        counted = weights[0] if weights else torch.ones_like(hits[..., 0])
        hits, count = hits * counted[..., None], counted.sum()
        return {"accuracy": (hits[..., 0].sum(), count), "top5": (hits.sum(), count)}
