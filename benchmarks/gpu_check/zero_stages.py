"""Stage 3: equal steps at every ZeRO stage from one checkpoint, and a change of stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_check.models import job, read_config
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.training import Trainer
from megavis.parallel.launch import Launch

LIMITS: Mapping[str, float] = {"float32": 1e-5, "bf16": 1e-2}
"""Tolerance of losses, as a relative difference."""
_STAGES: Mapping[str, Sequence[int]] = {"float32": (0, 1, 2, 3), "bf16": (1, 2, 3)}


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    found: dict[str, Measure] = {}
    for precision in LIMITS:
        found[f"stages, {precision}"] = functools.partial(_compare_stages, precision)
        found[f"ZeRO-3 to ZeRO-1, {precision}"] = functools.partial(_change_stage, precision)
    return found


def _compare_stages(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    first, *others = _STAGES[precision]
    folder = settings.folder / "scratch" / f"zero-{precision}"
    _train(launch, settings, precision, first, 2, save_to=folder)
    steps = 3 if settings.small else 20
    wanted = _train(launch, settings, precision, first, steps, load_from=folder)
    rows = []
    for stage in others:
        losses = _train(launch, settings, precision, stage, steps, load_from=folder)
        rows.append(_row(f"{precision}, ZeRO-{stage} against {first}", losses, wanted, precision))
    return rows


def _change_stage(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    folder = settings.folder / "scratch" / f"change-{precision}"
    steps = 2 if settings.small else 10
    wanted = _train(launch, settings, precision, 3, 2 * steps, save_to=folder, save_after=steps)
    losses = _train(launch, settings, precision, 1, steps, load_from=folder)
    name = f"{precision}, saved at ZeRO-3, on at ZeRO-1"
    return [_row(name, losses, wanted[steps:], precision)]


def _row(name: str, losses: list[float], wanted: list[float], precision: str) -> Row:
    difference = largest_difference(losses, wanted)
    limit = LIMITS[precision]
    return Row(
        f"{name}: loss of {len(losses)} steps",
        difference,
        aim=f"≤ {limit:g}",
        passed=difference <= limit,
        detail={"losses": losses, "wanted": wanted},
    )


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference; infinite if a value is not finite."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return max(each if each < float("inf") else float("inf") for each in differences)


def _train(
    launch: Launch,
    settings: Settings,
    precision: str,
    stage: int,
    steps: int,
    *,
    load_from: Path | None = None,
    save_to: Path | None = None,
    save_after: int | None = None,
) -> list[float]:
    """Train a demo's model for some steps; return their losses.

    Args:
        launch: launch of the process.
        settings: settings of the check.
        precision: compute precision.
        stage: ZeRO stage.
        steps: number of steps.
        load_from: run folder to resume from; None for fresh weights.
        save_to: run folder to write.
        save_after: steps before saving; None for all.
    """
    words = [f"parallel.zero_stage={stage}", f"training.precision={precision}"]
    words.append(f"training.batch_size={2 if settings.small else 16}")
    losses = []
    with job(launch, settings) as context:
        trainer = Trainer(read_config("igpt/demo.yaml", words), context)
        if load_from is not None:
            trainer.load(load_from)
        for number in range(1, steps + 1):
            losses.append(trainer.step())
            if save_to is not None and number == (save_after or steps):
                trainer.save(save_to)
    return losses
