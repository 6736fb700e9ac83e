"""Whether a run has finished, as its folder shows; for searches, sweeps and those who watch."""

from __future__ import annotations

from pathlib import Path

from megavis.checkpoint.format.folder import checkpoints_by_age
from megavis.config.schema import RunConfig
from megavis.training.callbacks.early_stopping import EarlyStopping, accuracy_history
from megavis.training.metrics import read_metrics


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether the last step is saved and validated and, when fine-tuning, evaluated.

    A signal may abort the last validation, or come before the evaluation, when the last step is
    saved already; a restarted run repeats them.

    Args:
        config: of the run; with more steps than the run has had, it is not finished.
        folder: of the run.
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
