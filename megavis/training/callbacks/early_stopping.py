"""Stop fine-tuning early, and select its best step.

"Generative Pretraining from Pixels", section 3.4: fine-tuning stops early, at the highest
validation accuracy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import StepState
from megavis.training.metrics import read_metrics

ACCURACY = "validation_accuracy"
"""Key of `metrics.jsonl` used for the decision."""


class EarlyStopping:
    """A callback that checkpoints the best step, and stops without further improvement.

    Attributes:
        patience: validations without improvement after which training stops; 0 for never.
        history: step and accuracy of each validation so far, the same on every process.
    """

    def __init__(self, patience: int, history: Iterable[tuple[int, float]] = ()) -> None:
        self.patience, self.history = patience, list(history)

    @classmethod
    def resume(
        cls, patience: int, run_folder: Path, step: int, context: ParallelContext
    ) -> EarlyStopping:
        """Return the state of a run after `step` steps; called on every process."""
        history = [
            entry for entry in accuracy_history(read_metrics(run_folder)) if entry[0] <= step
        ]
        # The folder may appear older on another node.
        return cls(patience, context.from_main(history))

    def __call__(self, state: StepState) -> None:
        """Check the step's accuracy if it was measured, after the first step."""
        if state.step == 0 or ACCURACY not in state.record:
            return
        # Use the main process's value: the last bit may differ elsewhere.
        context = state.engine.context
        accuracy = torch.tensor(state.record[ACCURACY], dtype=torch.float64, device=context.device)
        dist.broadcast(accuracy, src=0, group=context.world.group)
        self.history.append((state.step, float(accuracy)))
        if self.is_over:
            state.stop = f"no new best accuracy in {self.patience} validations"
        state.wants_checkpoint |= self.is_over or self.best_step == state.step

    @property
    def best_step(self) -> int | None:
        """The first step with the highest accuracy; None before the first validation."""
        return self.best_of([step for step, _ in self.history])

    def best_of(self, steps: Collection[int]) -> int | None:
        """Return the best of these steps; None if none of them was validated.

        A checkpoint that could not be written does not end training, so the best step may have
        none.
        """
        measured = [entry for entry in self.history if entry[0] in steps]
        best = max(measured, key=lambda entry: (entry[1], -entry[0]), default=None)
        return best and best[0]

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` validations brought no improvement."""
        if not self.patience or not self.history:
            return False
        since = [step for step, _ in self.history if step > (self.best_step or 0)]
        return len(since) >= self.patience


def accuracy_history(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return step and accuracy of each record of `metrics.jsonl` that has one, after step 0."""
    return [
        (int(record["step"]), record[ACCURACY])
        for record in records
        if ACCURACY in record and record["step"] > 0
    ]
