"""Train one run of a search or sweep, where divergence is a result, and check that it finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megavis.checkpoint.format.folder import checkpoints_by_age
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import Callback
from megavis.training.callbacks.validation import EarlyStopping, accuracy_history
from megavis.training.faults.bad_steps import BadStepsError
from megavis.training.faults.interruption import Signals
from megavis.training.metrics import read_metrics
from megavis.training.run_folder import hold_run
from megavis.training.trainer import Trainer

_GIVEN_UP = "given_up.json"


def train_trial(
    config: RunConfig, context: ParallelContext, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a run from its newest checkpoint; give it up if too many steps in a row are bad.

    Called on every process. `callbacks` run after the config's after each step.
    """
    folder = config.folder
    run = Trainer.open(config, context)
    try:
        with Signals() as signals, hold_run(folder, context):
            run.train(signals, callbacks)
    except BadStepsError as error:
        if context.is_main:
            give_up(folder, step=error.step, steps=config.training.steps, reason=str(error))


def give_up(folder: Path, *, step: int, steps: int, reason: str) -> None:
    """Record that a run diverged at `step` of `steps` and is not to be resumed."""
    record = {"step": step, "steps": steps, "reason": reason}
    write_atomically(folder / _GIVEN_UP, json.dumps(record).encode())


def given_up_at(config: RunConfig) -> int | None:
    """Return the step at which a run was given up; None if it was not."""
    path = config.folder / _GIVEN_UP
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    # A different number of steps is a different schedule, which may not diverge.
    return int(record["step"]) if record["steps"] == config.training.steps else None


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether the last step is saved and validated and, when fine-tuning, evaluated.

    After the last step is saved, a signal may still abort the last validation or precede the
    evaluation; a restarted run repeats them. A run is not finished if its config has more steps
    than it has taken.
    """
    newest = next(iter(checkpoints_by_age(folder)), None)
    step = int(newest.name.removeprefix("step-")) if newest is not None else 0
    records = [record for record in read_metrics(folder) if record["step"] <= step]
    is_over = step >= config.training.steps
    if config.finetune is not None:
        # Its report is written last.
        if not (folder / "evaluation" / "finetune_test.json").exists():
            return False
        stopping = EarlyStopping(config.finetune.patience, accuracy_history(records))
        is_over = is_over or stopping.is_over
    validates = config.data.validation is not None and config.training.validate_every
    is_validated = any("validation_loss" in r and r["step"] == step for r in records)
    return is_over and (is_validated or not validates)
