"""Latents of images from either of GIVT's models, in batches shared out over the processes.

Legend: b images, n tokens, d numbers of a token, c channels and h, w of the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.runner import Runner
from megavis.objectives.real_tokens import OneByOne, ReadsImages, RealTokens, Uncovers
from megavis.parallel.random import normal
from megavis.sampling.continuous import generate_tokens
from megavis.sampling.densities import TokenChoice
from megavis.sampling.guidance import Acceptance
from megavis.sampling.maskgit import MaskGITSchedule, uncover


@dataclass(frozen=True)
class LatentSampler:
    """Draws latents.

    Attributes:
        runner: the model, in any layout.
        objective: the paper, causal or masked.
        choice: what is done to densities.
        schedule: rounds of the masked model.
        seed: decides every draw, together with the number of the image.
        acceptance: how guidance fared.
    """

    runner: Runner
    objective: RealTokens
    choice: TokenChoice = TokenChoice()
    schedule: MaskGITSchedule = MaskGITSchedule()
    seed: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        if self.choice.guidance and not self.objective.has_null_label:
            raise UserError(
                "--guidance wants a model that was trained with objective.label_dropout; this one"
                " has no prediction without a class"
            )
        if self.choice.searches and not isinstance(self.objective, OneByOne):
            raise UserError("--beams and --fans are for the causal model")

    def draw(self, labels: Tensor, images: Tensor, *, seen: Tensor | None = None) -> Tensor:
        """Draw latents.

        Args:
            labels: int64 `[b]`, classes; -1: none.
            images: int64 `[b]`, numbers of the images.
            seen: uint8 `[b, H, W, 3]`, what an encoder reads, for a model that has one.

        Returns:
            float32 `[b, c, h, w]`.
        """
        return self.to_latents(self.tokens(labels, images, seen=seen))

    def tokens(
        self,
        labels: Tensor,
        images: Tensor,
        *,
        prefix: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens `[b, n, d]` as the model predicts them; arguments as `draw` has them.

        Args:
            labels: classes.
            images: numbers of the images.
            prefix: the first tokens `[b, p, d]`, for the causal model.
            seen: what an encoder reads.

        Raises:
            UserError: a label is out of range, a prefix is given to the masked model, or the
                encoder's images are missing or have another shape.
        """
        device = self.runner.context.device
        rows = self.objective.label_rows(labels, len(labels), device)
        images = images.to(device)
        if isinstance(self.objective, OneByOne):
            return generate_tokens(
                self.runner,
                self.objective,
                rows,
                images,
                choice=self.choice,
                seed=self.seed,
                acceptance=self.acceptance,
                prefix=prefix,
                memory=self._memory(seen),
            )
        if prefix is not None:
            raise UserError("only the causal model goes on from given tokens")
        return self._uncover(rows, images)

    def _memory(self, seen: Tensor | None) -> Tensor | None:
        """Encode images, once for all tokens; None for a model without an encoder."""
        objective = self.objective
        if not isinstance(objective, ReadsImages):
            return None
        if seen is None:
            raise UserError("this model predicts from images: give those that its encoder reads")
        images = objective.condition(seen.to(self.runner.context.device))
        return self.runner.on_first_stage(lambda layer: objective.first_layer(layer).memory(images))

    def change_of_label(self, labels: Tensor, later: Tensor, images: Tensor) -> Tensor:
        """Draw latents whose second half has another class (figure 19).

        The first half is that of `draw(labels, images)`, number for number.

        Args:
            labels: int64 `[b]`, classes of the first half.
            later: int64 `[b]`, classes of the second.
            images: numbers of the images.

        Raises:
            UserError: the model is the masked one, or a label is out of range.
        """
        if not isinstance(self.objective, OneByOne):
            raise UserError("only the causal model goes on from given tokens")
        self.objective.label_rows(later, len(later), self.runner.context.device)
        first = self.tokens(labels, images)[:, : self.objective.num_tokens // 2]
        return self.to_latents(self.tokens(later, images, prefix=first))

    def rounds(self, labels: Tensor, images: Tensor) -> list[Tensor]:
        """Return the masked model's latents after each round (figure 15)."""
        device = self.runner.context.device
        rows = self.objective.label_rows(labels, len(labels), device)
        seen: list[Tensor] = []
        self._uncover(rows, images.to(device), report=lambda tokens: seen.append(tokens.clone()))
        return [self.to_latents(tokens) for tokens in seen]

    def prior(self, images: Tensor) -> Tensor:
        """Draw latents from N(0, 1), what the VAE takes the world for (figure 15)."""
        shape = self.objective.latent_shape
        count = shape[0] * shape[1] * shape[2]
        images = images.to(self.runner.context.device)
        return normal(images, count, seed=self.seed, purpose="prior").view(-1, *shape)

    def to_latents(self, tokens: Tensor) -> Tensor:
        """Return latents `[b, c, h, w]` of tokens `[b, n, d]`: the adapter's work undone."""
        return self.runner.on_first_stage(
            lambda layer: self.objective.first_layer(layer).latents(tokens)
        )

    def _uncover(
        self, rows: Tensor, images: Tensor, report: Callable[[Tensor], Any] = lambda tokens: None
    ) -> Tensor:
        objective = self.objective
        if not isinstance(objective, Uncovers):
            raise UserError("only the masked model draws in rounds")
        return uncover(
            _Proposals(self, objective, rows, images),
            images,
            num_tokens=objective.num_tokens,
            token_size=objective.token_size,
            schedule=self.schedule,
            seed=self.seed,
            report=report,
        )

    def with_choice(self, **changes: Any) -> LatentSampler:
        """Return the same sampler with other values of `choice`."""
        return replace(self, choice=replace(self.choice, **changes), acceptance=Acceptance())


@dataclass(frozen=True)
class _Proposals:
    """Draws all tokens of a round of the masked model."""

    sampler: LatentSampler
    objective: Uncovers
    rows: Tensor
    images: Tensor

    def __call__(self, tokens: Tensor, hidden: Tensor, step: int) -> tuple[Tensor, Tensor]:
        sampler, objective, rows = self.sampler, self.objective, self.rows
        if sampler.choice.guidance:
            rows = torch.cat([rows, torch.full_like(rows, objective.null_row)])
            tokens, hidden = torch.cat([tokens] * 2), torch.cat([hidden] * 2)
        predictions = sampler.runner.predictions((tokens, rows, hidden))
        parameters = objective.parameters(predictions)
        halves = parameters.chunk(2) if sampler.choice.guidance else (parameters,)
        count, places = len(self.images), objective.num_tokens
        keys = self.images[:, None] * places + torch.arange(places, device=self.images.device)
        drawn, log_prob = sampler.choice.draw(
            [objective.density(half.flatten(0, 1)) for half in halves],
            keys.flatten(),
            seed=sampler.seed,
            purpose=f"round/{step}",
            acceptance=sampler.acceptance,
        )
        return drawn.view(count, places, -1), log_prob.view(count, places)
