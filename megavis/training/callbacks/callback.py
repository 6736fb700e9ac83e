"""Callback interface of the training loop, and the state after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from megavis.config.schema import CheckpointConfig
from megavis.training.engine import Engine


@dataclass
class StepState:
    """State passed to callbacks after a step; `record` becomes the step's line of metrics."""

    step: int
    """Optimizer steps taken so far."""
    last_step: int
    loss: Tensor | None
    """Loss on the device; reading it synchronizes. None before the first step."""
    engine: Engine
    record: dict[str, float] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    wants_checkpoint: bool = False
    """Set by a callback, equally on every process, to save this step even if not due."""
    stop: str | None = None
    """Reason to end training now; set by a callback, equally on every process."""
    goes_back: bool = False
    """Set by a callback with `stop`: the last steps are dropped, so this one is not saved."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last step."""
        return self.step == self.last_step or self.stop is not None

    def is_due(self, every: int) -> bool:
        """Whether an action every `every` steps is due, also at the end; never if `every` is 0."""
        return bool(every) and (self.step % every == 0 or self.step == self.last_step)

    def needs_checkpoint(self, saving: CheckpointConfig) -> bool:
        """Whether this step is saved: one that is due, that a callback requests, or the last."""
        due = self.is_due(saving.every) or self.step in saving.keep_at
        return due or self.wants_checkpoint or self.step == self.last_step


class Callback(Protocol):
    """Called on every process after every step, and once before the first."""

    def __call__(self, state: StepState) -> None:
        """Handle a step; may add to its record."""
