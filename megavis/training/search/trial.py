"""Train one run of a search or sweep, in which a run that diverges is a result and not an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megavis.config.load import LoadedConfig
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import Callback
from megavis.training.faults.bad_steps import BadStepsError
from megavis.training.faults.interruption import Signals
from megavis.training.job import hold_run
from megavis.training.trainer import Trainer

_GIVEN_UP = "given_up.json"


def train_trial(
    loaded: LoadedConfig, context: ParallelContext, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a run from its newest checkpoint; give it up if too many steps in a row are bad.

    Args:
        loaded: its config.
        context: the job; called on every process.
        callbacks: called after each step, after those of the config.
    """
    folder = Path(loaded.config.folder)
    run = Trainer.open(loaded, context)
    try:
        with Signals() as signals, hold_run(folder, context):
            run.train(signals, callbacks)
    except BadStepsError as error:
        if context.is_main:
            give_up(folder, step=error.step, steps=loaded.config.training.steps, reason=str(error))


def give_up(folder: Path, *, step: int, steps: int, reason: str) -> None:
    """Record that a run diverged at `step` of `steps` and is not to be resumed."""
    record = {"step": step, "steps": steps, "reason": reason}
    write_atomically(folder / _GIVEN_UP, json.dumps(record).encode())


def given_up_at(config: RunConfig) -> int | None:
    """Return the step at which a run was given up; None if it was not."""
    path = Path(config.folder) / _GIVEN_UP
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    # Another number of steps is another schedule, which may not diverge.
    return int(record["step"]) if record["steps"] == config.training.steps else None
