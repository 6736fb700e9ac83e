"""What the training loop and its callbacks share: the state after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from megavis.training.engine import Engine


@dataclass
class StepState:
    """What callbacks see after a step; `record` becomes the step's line of metrics."""

    step: int
    """Optimizer steps taken so far."""
    last_step: int
    loss: Tensor | None
    """On the device; reading it waits for the device. None before the first step."""
    engine: Engine
    record: dict[str, float] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    wants_checkpoint: bool = False
    """A callback sets it, the same on every process: this step is saved, due or not."""
    stop: str | None = None
    """Why training ends here and now; a callback sets it, the same on every process."""
    goes_back: bool = False
    """Set by a callback with `stop`: the last steps are dropped, so this one is not saved."""

    @property
    def is_last(self) -> bool:
        """True where no step follows."""
        return self.step == self.last_step or self.stop is not None

    def is_due(self, every: int) -> bool:
        """True every so many steps and at the end; never where `every` is 0."""
        return bool(every) and (self.step % every == 0 or self.step == self.last_step)


class Callback(Protocol):
    """A side job; called on every process after every step, and once before the first."""

    def __call__(self, state: StepState) -> None:
        """Look at the state; may add to its record."""
