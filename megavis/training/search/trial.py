"""Train one run of a search or sweep, where divergence is a result.

Also check that a run has finished, and that an earlier one was trained as its config says: a run
may be resumed with another schedule, say, but then it is no point of a search.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megavis.checkpoint.format.folder import (
    checkpoints_by_age,
    early_stopping_file,
    finetuning_file,
    saved_steps,
)
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.data.format.manifest import hold_other_samples
from megavis.grammar.same_run import check_same_run, first_difference
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import Callback
from megavis.training.callbacks.validation import EarlyStopping, accuracy_history
from megavis.training.faults.bad_steps import BadStepsError
from megavis.training.faults.interruption import Signals, forgiving_messages
from megavis.training.metrics import read_metrics
from megavis.training.trainer import train_in_job

_GIVEN_UP = "given_up.json"
_WITHOUT_RESULT = (
    *("steps", "micro_batch_size", "deterministic", "kernels", "log_every", "validate_every"),
    *("sample_every", "sample_images", "hang_timeout", "check_replicas_every", "max_restarts"),
    *("train", "validation", "cache", "cache_gib", "may_change", "threads"),
)
"""Keys of `training` and `data` on which results do not depend, but for rounding, or that are
compared apart."""


def check_trial(config: RunConfig) -> None:
    """Compare a config with the run in its folder, if there is one, whose results count as its own.

    More steps are allowed. Folders of images are compared by what they hold: they may have moved.

    Raises:
        UserError: they differ in something that the results depend on.
    """
    path = config.folder / "config.yaml"
    is_started = checkpoints_by_age(config.folder) or (config.folder / _GIVEN_UP).exists()
    if not is_started or not path.exists():
        return
    check_same_run(path, config)
    difference = next(_differences(load_config(path).config, config), None)
    if difference is not None:
        raise UserError(
            f"{path}: this run was trained with {difference}; choose another name, or restore the"
            " value"
        )


def _differences(before: RunConfig, config: RunConfig) -> Iterator[str]:
    steps = before.training.steps, config.training.steps
    if steps[0] > steps[1]:
        yield f"training.steps {steps[0]}, not {steps[1]}"
    for key in ("optimizer", "schedule", "training", "data"):
        old, new = getattr(before, key), getattr(config, key)
        known = type(new).model_fields
        same = {name: getattr(new, name) for name in _WITHOUT_RESULT if name in known}
        old = old.model_copy(update=same)
        if old != new:
            yield first_difference(key, old, new)
    for key, first, second in _image_folders(before, config):
        if first != second and hold_other_samples(first, second):
            yield f"{key} {first}, which holds other images than {second}"
    crops = before.data.training_crops, config.data.training_crops
    if crops[0] != crops[1]:
        yield f"crops {', '.join(crops[0])} of data.train, not {', '.join(crops[1])}"


def _image_folders(before: RunConfig, config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, earlier folder and folder of the images that both configs have."""
    if before.data.validation and config.data.validation:
        yield "data.validation", before.data.validation, config.data.validation
    for old, new in zip(before.data.train_sources, config.data.train_sources, strict=True):
        yield "data.train", old.path, new.path


def train_trial(
    config: RunConfig, context: ParallelContext, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a run from its newest checkpoint; give it up if too many steps in a row are bad.

    Called on every process. `callbacks` run after the config's after each step.
    """
    folder = config.folder
    try:
        with forgiving_messages(), Signals() as signals:
            train_in_job(config, context, signals, callbacks)
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
    """Return whether the last step is saved and validated, and what follows it is written.

    The latter is the evaluation of fine-tuning, or the best step of early stopping. After the last
    step is saved, a signal may still abort the last validation or precede these; a restarted run
    repeats them. A run is not finished if its config has more steps than it has taken, unless it
    stopped early.
    """
    newest = next(iter(checkpoints_by_age(folder)), None)
    step = int(newest.name.removeprefix("step-")) if newest is not None else 0
    records = [record for record in read_metrics(folder) if record["step"] <= step]
    is_over = step >= config.training.steps
    tunes = config.finetune
    patience = config.training.patience if tunes is None else tunes.patience
    if tunes is not None or patience:
        stopping = EarlyStopping(patience, accuracy_history(records))
        result = early_stopping_file(folder) if tunes is None else finetuning_file(folder)
        # It is written last; without a validated checkpoint, early stopping has nothing to write.
        if not result.exists() and (tunes or stopping.best_of(saved_steps(folder)) is not None):
            return False
        is_over = is_over or stopping.is_over
    validates = config.data.validation is not None and config.training.validate_every
    is_validated = any("validation_loss" in r and r["step"] == step for r in records)
    return is_over and (is_validated or not validates)
