"""Limit restarts that make no progress."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.parallel.context import ParallelContext

RECORD_NAME = "restarts.json"


def count_restart(run_folder: Path, first_step: int, limit: int, context: ParallelContext) -> None:
    """Count this start if a scheduler made it; every process calls this.

    Args:
        run_folder: the run, which keeps the count.
        first_step: step of the checkpoint that it resumes from.
        limit: restarts allowed from the same checkpoint.
        context: where this process stands.

    Raises:
        UserError: on every process, when the limit is exceeded.
    """
    refusal = ""
    if context.is_main and is_automatic(os.environ):
        refusal = _count(run_folder / RECORD_NAME, first_step, limit)
    refusal = context.from_main(refusal)
    if refusal:
        raise UserError(refusal)


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM or torchrun restarted this job automatically."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(int(environment.get(name, "0")) > 0 for name in counts)


def _count(record: Path, first_step: int, limit: int) -> str:
    """Count; return what is wrong, or nothing."""
    before = json.loads(record.read_text()) if record.exists() else {}
    restarts = before["restarts"] + 1 if before.get("step") == first_step else 1
    if restarts > limit:
        record.unlink()
        return (
            f"{record.parent}: restarted {limit} times without a new checkpoint since step"
            f" {first_step} (training.max_restarts); look into the log for what ends it, then start"
            " it again"
        )
    content = {"step": first_step, "restarts": restarts}
    write_atomically(record, json.dumps(content).encode())
    return ""
