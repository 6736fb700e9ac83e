"""Densities: the last layer, the loss of a token, and how one is drawn.

Legend: b images, q predicted positions, r rows (images, with beams and guidance several each), d
numbers of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.decoders import NO_DECODER, DecoderWork
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.parallel.random import normal, uniform
from megavis.schedules.schedule import NoOptions

_BLOCK = 32
"""Positions whose numbers are made at once: making one takes as long."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one step of generation, functions of seed, token and purpose.

    Attributes:
        keys: int64 `[r, q]`, a number for each token that is drawn.
        seed: of all draws.
        name: of the step.
        position: the first one that is drawn.
        blocks: numbers of the name that were made, by the first position of each block.
    """

    keys: Tensor
    seed: int
    name: str
    position: int
    blocks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens r · q."""
        return self.keys.numel()

    def moved(self, name: str, position: int) -> Draws:
        """Return the random numbers of another step, for the same keys."""
        blocks = self.blocks if name == self.name else {}
        return Draws(self.keys, self.seed, name, position, blocks)

    def uniform_of_position(self) -> Tensor:
        """Draw the number in [0, 1) of name and position for each token: float32 `[r · q]`."""
        start = self.position - self.position % _BLOCK
        if start not in self.blocks:
            self.blocks[start] = self.uniform(self.name, _BLOCK, first=start)
        return self.blocks[start][:, self.position - start]

    def uniform(self, purpose: str, count: int = 1, *, first: int = 0) -> Tensor:
        """Draw numbers in [0, 1) for each token: float32 `[r · q, count]`.

        Args:
            purpose: what they are for.
            count: numbers a token.
            first: which number of the purpose is the first.
        """
        keys = self.keys.flatten()
        return uniform(keys, count, seed=self.seed, purpose=purpose, first=first)

    def normal(self, purpose: str, count: int) -> Tensor:
        """Draw standard normals for each token: float32 `[r · q, count]`."""
        return normal(self.keys.flatten(), count, seed=self.seed, purpose=purpose)


@dataclass(frozen=True)
class Drawn:
    """What one step drew.

    Attributes:
        tokens: `[r, q]` or `[r, q, d]`.
        score: log-likelihood of each, float32 `[r, q]`; None unless requested.
        counts: int64 `[3]` of rejection sampling: numbers wanted, found, and proposed.
    """

    tokens: Tensor
    score: Tensor | None = None
    counts: Tensor | None = None

    def pack(self) -> tuple[Tensor, ...]:
        """Return the form that pipeline stages hand on; absent parts are empty, or left away."""
        if self.score is None and self.counts is None:
            return (self.tokens,)
        nothing = self.tokens.new_empty(0, dtype=torch.float32)
        parts = (self.tokens, self.score, self.counts)
        return tuple(nothing if part is None else part for part in parts)

    @classmethod
    def unpack(cls, parts: tuple[Tensor, ...]) -> Drawn:
        """Undo `pack`."""
        tokens, *others = parts
        return cls(tokens, *(part if part.numel() else None for part in others))


class Drawing(ABC):
    """Draws tokens from what a model predicts, in the head's place."""

    num_lanes: int = 1
    """Rows that the model runs for each token: 2 with guidance, the second without condition."""

    @abstractmethod
    def __call__(self, head: nn.Module, state: PackedState, draws: Draws) -> Drawn:
        """Draw the tokens at the last positions of `state`.

        Args:
            head: the model's last layer.
            state: what it would get, of `num_lanes` times as many rows.
            draws: one key for each token; several keys a row where candidates are drawn.
        """


class Density(ABC):
    """One distribution over tokens, and the head that gives its parameters."""

    options_type: ClassVar[type] = NoOptions
    """Dataclass of what a user may choose when tokens are drawn."""
    names: tuple[str, ...] = ()
    """What can be chosen by name of what the head reads besides hidden states: see `corrupted`."""
    num_outputs: int
    """Numbers that the head gives for a position, over all processes."""
    decoder: DecoderWork = NO_DECODER
    """What the head computes in training before its last matrix."""

    @abstractmethod
    def build_head(self) -> Head:
        """Return the last layer."""

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what is scored in training, and what the head reads besides hidden states.

        Args:
            tokens: the true ones `[b, q, ...]`.
            index: int64 `[b]`, of the samples, which decides random draws.
            choices: a user's, by name, in place of draws; others than `names` are of no meaning.

        Raises:
            UserError: a choice does not fit.
        """
        return tokens, ()

    def nothing_more(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
        """Return its placeholder where nothing is scored, for b images of m rows."""
        return ()

    @abstractmethod
    def per_token_loss(self, predictions: Any, targets: Any) -> Tensor:
        """Return the loss of each predicted token, float32 `[b, q]`.

        Args:
            predictions: what the head gives.
            targets: the true tokens `[b, q, ...]`.
        """

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return other numbers of a batch than its loss, with the loss's arguments."""
        return {}

    @abstractmethod
    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output whole and batch first, `[b, q, num_outputs]`."""

    def restored(self, predictions: Any, targets: Tensor) -> Tensor:
        """Return the tokens `[b, q, ...]` that predictions represent, to be shown as images.

        Args:
            predictions: what the head gives.
            targets: the true tokens `[b, q, ...]`, from which comes what is not predicted.

        Raises:
            UserError: predictions are no tokens.
        """
        raise UserError("no image can be made of what this model predicts of hidden tokens")

    def drawing(self, options: Any, *, scored: bool) -> Drawing:
        """Return what draws tokens.

        Args:
            options: of `options_type`.
            scored: the log-likelihood of what is drawn is wanted.

        Raises:
            UserError: nothing can be drawn, or not with these options.
        """
        raise UserError("nothing can be drawn from what this model predicts")


def for_each_key(rows: Tensor, draws: Draws) -> Tensor:
    """Repeat predictions `[r0, q, ...]` for the candidates of each row: `[r, q, ...]`."""
    count = len(draws.keys) // len(rows)
    return rows if count == 1 else rows.repeat_interleave(count, dim=0)
