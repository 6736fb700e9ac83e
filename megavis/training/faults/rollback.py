"""Roll back to a checkpoint from before bad steps, and skip the data of those steps.

"PaLM: Scaling Language Modeling with Pathways", section 5.1: where the loss spiked, training was
started again from a checkpoint about 100 steps before the spike, and about 200 to 500 batches were
left out, those before and during the spike; the same data at another point of training did no harm.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megavis.checkpoint.format.folder import checkpoints_by_age, set_aside
from megavis.checkpoint.format.manifest import MANIFEST, CheckpointManifest, RollbackRecord
from megavis.checkpoint.state.recovery import Found, newest_intact_checkpoint
from megavis.config.errors import UserError
from megavis.config.schema import TrainingConfig
from megavis.data.format.files import write_atomically
from megavis.parallel.context import ParallelContext
from megavis.training.faults.bad_steps import BadStepStreak
from megavis.training.metrics import MetricsWriter, read_metrics


def roll_back(
    run_folder: Path, row: BadStepStreak, settings: TrainingConfig, context: ParallelContext
) -> Found:
    """Return the checkpoint to resume from, with the skipped data recorded in it.

    Every process calls this. Newer checkpoints are set aside. The checkpoint records the skipped
    data, so a resumed run skips the same, in any layout.

    Raises:
        UserError: on every process, when training may not go back, or there is nothing old enough.
        OSError: likewise, when the checkpoint cannot be written.
    """
    count = row.last - row.first + 1
    what = f"{count} steps in a row, up to step {row.last}, were bad (training.max_bad_steps)"
    advice = "lower optimizer.learning_rate, or look at the images at the positions above"
    if not settings.max_rollbacks:
        raise UserError(f"{what}: {advice}, or let it go back (training.max_rollbacks)")
    found = newest_intact_checkpoint(
        run_folder, context, up_to=row.first - 1 - settings.rollback_margin
    )
    if found is None:
        raise UserError(
            f"{what}, and no checkpoint is {settings.rollback_margin} steps"
            f" (training.rollback_margin) older than the first of them: {advice}"
        )
    folder, manifest = found
    times = 1 + (manifest.went_back.times if manifest.went_back else 0)
    if times > settings.max_rollbacks:
        raise UserError(
            f"{what}, after training has gone back to step {manifest.step} {times - 1} times"
            f" (training.max_rollbacks): {advice}"
        )
    changed = manifest.model_copy(
        update={
            "batches_skipped": row.next_batch + settings.rollback_margin - manifest.step,
            "went_back": RollbackRecord(
                times=times, first_bad_step=row.first, last_bad_step=row.last
            ),
        }
    )
    _agree_on(run_folder, folder, changed, context)
    return folder, changed


def _agree_on(
    run_folder: Path, folder: Path, changed: CheckpointManifest, context: ParallelContext
) -> None:
    """Write the changed manifest; raises OSError on every process if the main one cannot."""
    failure = ""
    if context.is_main:
        try:
            older = checkpoints_by_age(run_folder, up_to=changed.step)
            newer = [one for one in checkpoints_by_age(run_folder) if one not in older]
            # First: a kill between the two leaves a run that meets the bad steps again.
            set_aside(run_folder, newer, newest=folder)
            write_atomically(folder / MANIFEST, changed.model_dump_json().encode())
            sys.stderr.write(
                f"WARNING: going back to {folder}, and on with batch"
                f" {changed.step + changed.batches_skipped} of the sample order\n"
            )
        except OSError as error:
            failure = str(error)
    failure = context.from_main(failure)
    if failure:
        raise OSError(failure)


def record_rollback(metrics: MetricsWriter, run_folder: Path, manifest: CheckpointManifest) -> None:
    """Write the event's line at the step that was gone back to, unless it is there."""
    event = manifest.went_back
    if event is None:
        return
    values = {
        "went_back_from": event.last_bad_step,
        "first_bad_step": event.first_bad_step,
        "times_gone_back": event.times,
        "batches_skipped": manifest.batches_skipped,
    }
    if {"step": manifest.step, **values} not in read_metrics(run_folder):
        metrics.write(manifest.step, values)
