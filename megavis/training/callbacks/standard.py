"""Build the callbacks of a training run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.training.callbacks.base import (
    Callback,
    CollectGarbage,
    LogMetrics,
    ShowProgress,
    StepState,
    Validate,
)
from megavis.training.callbacks.replaced_samples import ReportReplacedSamples
from megavis.training.callbacks.samples import SampleImages
from megavis.training.callbacks.saving import SaveCheckpoint
from megavis.training.faults.interruption import StopOnSignal
from megavis.training.finetune import Finetuning
from megavis.training.metrics import MetricsWriter, read_metrics

if TYPE_CHECKING:
    from megavis.training.run import TrainingRun


def build_callbacks(
    run: TrainingRun,
    first_step: int,
    validate: Validate | None,
    interruption: StopOnSignal,
    save: SaveCheckpoint,
    extra: Sequence[Callback],
) -> list[Callback]:
    """Return the side jobs that a run's config asks for.

    Args:
        run: opened and checked.
        first_step: steps already taken.
        validate: measures on held-out images, if there are any.
        interruption: asks all to stop; what may ask for a checkpoint comes before the extra ones.
        save: is called by the loop itself, last; its waiting is recorded here.
        extra: others, called after those that decide whether a step is saved.
    """
    settings, paper = run.config.training, run.objective
    log = LogMetrics(
        settings.log_every,
        flops_per_image=paper.flops_per_image(),
        tokens_per_image=paper.backbone.num_tokens,
    )
    replaced = ReportReplacedSamples(settings.log_every, run.train_data, run.context)
    callbacks: list[Callback] = [log, save.record_stall, replaced]
    if validate is not None:
        callbacks.append(validate)
    if run.finetuning is not None:
        callbacks.append(run.finetuning.stopping)
    callbacks.append(interruption)
    if settings.sample_every:
        callbacks.append(
            SampleImages(
                run.folder,
                run.validation_data,
                objective=paper,
                every=settings.sample_every,
                num_images=settings.sample_images,
            )
        )
    callbacks += [*extra, CollectGarbage()]
    if run.context.is_main:
        callbacks.append(ShowProgress(first_step, settings.steps))
    return [*callbacks, log.restart_clock]


def make_up_for(
    validate: Validate,
    state: StepState,
    finetuning: Finetuning | None,
    metrics: MetricsWriter | None,
    run_folder: Path,
) -> None:
    """Make the validation that a signal broke off just before the run was saved.

    Every process calls this, with the state that was saved. So the metrics of a run that was
    interrupted are those of one that was not.
    """
    if not state.is_due(validate.every):
        return
    context = state.engine.context
    lines = read_metrics(run_folder)
    is_done = any("validation_loss" in line and line["step"] == state.step for line in lines)
    # The folder may look older on another node.
    if context.from_main(is_done):
        return
    validate(state)
    if finetuning is not None:
        finetuning.stopping(state)
    if metrics is not None and state.record:
        metrics.amend(state.step, state.record)
