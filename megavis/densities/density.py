"""Densities: how a token is predicted, scored and sampled.

Legend: b images, q predicted positions, r rows (several per image with beams or guidance), d values
of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.model.core import Core
from megavis.model.flops import Workload
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.model.stack import PlannedStack
from megavis.parallel.random import normal, uniform
from megavis.schedules.schedule import NoOptions

UNSCORED = "beam search and generation in rounds need likelihoods, which {} lacks"
"""Error of `Density.token_sampler` for samples without a log-likelihood."""
GUIDANCE_SCHEDULES = ("constant", "linear")

_BLOCK = 32
"""Positions whose draws are generated together, which takes no longer than generating one."""


@dataclass(frozen=True)
class DecoderWork:
    """Work of a head in training before its final linear layer, per position that it reads.

    Attributes:
        flops: operations of the forward pass outside of blocks, counted as in `model/flops.py`.
        blocks: core of its blocks, which attend within pairs of tokens; None if it has none.
        count: pairs of each position.
    """

    flops: float = 0.0
    blocks: Core | None = None
    count: int = 1

    def stack(self, num_positions: int) -> PlannedStack | None:
        """Return the blocks and their work for `num_positions` positions of an image."""
        if self.blocks is None:
            return None
        num_pairs = self.count * num_positions
        rows = 2 * num_pairs
        return PlannedStack(self.blocks, Workload(rows, rows, 2.0, num_pairs, num_outputs=0))


NO_DECODER = DecoderWork()
"""Work of a head that is a norm and a linear layer."""


def check_not_negative(**values: float | None) -> None:
    """Raise UserError for an option that is not a number from 0; None is one that is not given."""
    for name, value in values.items():
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"the {name} must be 0 or more, not {value}")


def check_guidance_schedule(schedule: str | None, guidance: float) -> None:
    """Check an option `guidance_schedule`; raise UserError if it is unknown or has no effect."""
    if schedule is not None and schedule not in GUIDANCE_SCHEDULES:
        known = " or ".join(GUIDANCE_SCHEDULES)
        raise UserError(f"the schedule of the guidance must be {known}, not {schedule}")
    if schedule is not None and not guidance:
        raise UserError("the schedule of the guidance needs a guidance above 0")


class Density(ABC):
    """A family of distributions over tokens, and the head that predicts its parameters.

    Args:
        num_outputs: outputs of the head per position, summed over all processes.
    """

    options_type: ClassVar[type] = NoOptions
    """Dataclass of the user's sampling options."""
    names: tuple[str, ...] = ()
    """Names of the choices that `corrupted` accepts."""
    decoder: DecoderWork = NO_DECODER
    """Work of the head in training before its final linear layer."""
    predicts_tokens: ClassVar[bool] = False
    """Whether predictions can be turned into tokens without sampling; see `restored`."""

    def __init__(self, num_outputs: int, build_head: Callable[[], Head]) -> None:
        self.num_outputs, self.build_head = num_outputs, build_head

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the training targets, and the head's inputs besides hidden states.

        Args:
            tokens: the true tokens `[b, q, ...]`.
            index: int64 `[b]`, the samples, which determine random draws.
            choices: user's values by name, instead of draws; names not in `names` are ignored.

        Raises:
            UserError: a choice is invalid.
        """
        return tokens, ()

    def blank_inputs(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
        """Return blank inputs of the head for passes without a loss; `shape` is images and rows."""
        return ()

    @abstractmethod
    def per_token_loss(self, predictions: Any, targets: Any) -> Tensor:
        """Return the loss of each token, float32 `[b, q]`, for true tokens `[b, q, ...]`."""

    @property
    def measures_accuracy(self) -> bool:
        """True if `measures` has `accuracy`."""
        return False

    def measures(
        self, predictions: Any, targets: tuple[Tensor, ...]
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return metrics of a batch besides its loss, as sums and counts of tokens.

        The arguments are those of the loss.
        """
        return {}

    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output gathered and batch first, as most heads already do."""
        gathered: Tensor = predictions
        return gathered

    def restored(self, predictions: Any, targets: Tensor) -> Tensor:
        """Return the predicted tokens `[b, q, ...]`, to be shown as images.

        The true tokens `[b, q, ...]` provide statistics that are not predicted.

        Raises:
            UserError: the predictions are not tokens.
        """
        raise UserError("the predictions of this model cannot be shown as images")

    def token_sampler(self, options: Any, *, scored: bool) -> TokenSampler:
        """Return a sampler of tokens, if `scored` with log-likelihoods, or raise UserError."""
        raise UserError("predictions of this model cannot be sampled")


@dataclass(frozen=True)
class SamplingKeys:
    """Random draws of one step of generation, as functions of seed, token and purpose.

    Attributes:
        keys: int64 `[r, q]`, identifies each token to sample.
        position: the first position to sample.
        share_done: share of the generation before this step, in [0, 1).
        share_known: share of the tokens that are known after this step, in (0, 1].
        blocks: draws already generated for this name, by the first position of each block.
    """

    keys: Tensor
    seed: int
    name: str
    position: int
    share_done: float = 0.0
    share_known: float = 1.0
    blocks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, r · q."""
        return self.keys.numel()

    def moved(
        self, name: str, position: int, share_done: float, share_known: float
    ) -> SamplingKeys:
        """Return the draws of another step, for the same keys."""
        blocks = self.blocks if name == self.name else {}
        return SamplingKeys(self.keys, self.seed, name, position, share_done, share_known, blocks)

    def uniform_of_position(self) -> Tensor:
        """Draw a uniform value in [0, 1) for each token at this position: float32 `[r · q]`."""
        start = self.position - self.position % _BLOCK
        if start not in self.blocks:
            self.blocks[start] = uniform(
                self.keys.flatten(), _BLOCK, seed=self.seed, purpose=self.name, first=start
            )
        return self.blocks[start][:, self.position - start]

    @property
    def purpose(self) -> str:
        """Prefix of the purposes of all draws at this position."""
        return f"{self.name}/{self.position}"

    def uniform(self, purpose: str) -> Tensor:
        """Draw a uniform value in [0, 1) for each token at this position: float32 `[r · q]`."""
        keys, purpose = self.keys.flatten(), f"{self.purpose}/{purpose}"
        return uniform(keys, 1, seed=self.seed, purpose=purpose)[:, 0]

    def normal(self, purpose: str, count: int) -> Tensor:
        """Draw standard normals for each token: float32 `[r · q, count]`."""
        keys, purpose = self.keys.flatten(), f"{self.purpose}/{purpose}"
        return normal(keys, count, seed=self.seed, purpose=purpose)


@dataclass(frozen=True)
class Samples:
    """Tokens sampled in one step.

    Attributes:
        tokens: `[r, q]` or `[r, q, d]`.
        score: log-likelihood of each token, float32 `[r, q]`; None unless requested.
        counts: int64 `[3]` of rejection sampling: values requested, accepted, and proposed.
    """

    tokens: Tensor
    score: Tensor | None = None
    counts: Tensor | None = None

    def pack(self) -> tuple[Tensor, ...]:
        """Return a tuple of tensors to send between pipeline stages; absent parts are empty."""
        if self.score is None and self.counts is None:
            return (self.tokens,)
        nothing = self.tokens.new_empty(0, dtype=torch.float32)
        parts = (self.tokens, self.score, self.counts)
        return tuple(nothing if part is None else part for part in parts)

    @classmethod
    def unpack(cls, parts: tuple[Tensor, ...]) -> Samples:
        """Undo `pack`."""
        tokens, *others = parts
        return cls(tokens, *(part if part.numel() else None for part in others))


class TokenSampler(ABC):
    """Samples tokens from a model's predictions; replaces the head in generation."""

    @property
    def num_lanes(self) -> int:
        """Rows of the model per sampled row: 2 with guidance, where the second is unconditional."""
        return 1

    @abstractmethod
    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        """Sample the tokens at the last positions of `state`.

        Args:
            state: input of the head, with `num_lanes` times as many rows.
            draws: one key per token; several per row to sample several candidates.
        """


def for_each_key(rows: Tensor, draws: SamplingKeys) -> Tensor:
    """Repeat predictions `[rows, q, ...]` for the candidates of each row: `[r, q, ...]`."""
    count = len(draws.keys) // len(rows)
    return rows if count == 1 else rows.repeat_interleave(count, dim=0)
