"""Stage 8: two equal runs, the replica check, and corrections for the planner."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from benchmarks.gpu_check.kernels import seconds_of, synchronize
from benchmarks.gpu_check.machine import SMALL_IMAGES
from benchmarks.gpu_check.models import TINY, job, read_config, write_palette_shards
from benchmarks.gpu_check.planned import planned_device, planned_time
from benchmarks.gpu_check.presets import PRESETS
from benchmarks.gpu_check.refit import host_row, suggestions
from benchmarks.gpu_check.results import Measure, Row, Settings, read_stage
from benchmarks.gpu_check.training import Trainer
from benchmarks.replica_check import measure
from benchmarks.timing import summary
from megavis.parallel.launch import Launch


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts; the last one uses results of the others and of other stages."""
    presets = list(PRESETS)[:1] if settings.small else list(PRESETS)
    host = {f"host time, {name}": functools.partial(_host_time, name) for name in presets}
    runs = {f"two runs, {p}": functools.partial(_two_runs, p) for p in ("float32", "bf16")}
    return {**runs, "replica check": replica_check, **host, "refit": refit}


def _two_runs(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    words = [f"training.precision={precision}", "parallel.zero_stage=1"]
    words.append(f"training.batch_size={2 if settings.small else 16}")
    curves = []
    for _ in range(2):
        with job(launch, settings, deterministic=True) as context:
            trainer = Trainer(read_config("igpt/demo.yaml", words), context)
            curves.append([trainer.step() for _ in range(3 if settings.small else 20)])
    same = curves[0] == curves[1]
    title = f"two deterministic runs of {len(curves[0])} steps, {precision}: the same bits"
    return [Row(title, same, aim="yes", passed=same, detail={"losses": curves})]


def replica_check(launch: Launch, settings: Settings) -> list[Row]:
    """Check a model as `training.check_replicas_every` does; raises if bits differ."""
    tiny = (*TINY, "data.image_size=8") if settings.small else ("model.num_layers=6",)
    config = read_config("igpt/s_32.yaml", [*tiny, "training.batch_size=4"])
    shards = write_palette_shards(
        settings.folder / "scratch" / "palette",
        count=8 if settings.small else 64,
        size=config.data.image_size,
    )
    with job(launch, settings) as context:
        taken = measure(config, shards, context, rounds=2 if settings.small else 5)
    return [
        Row("replica check: two passes agree", True, aim="yes", passed=True),
        *(
            Row(f"replica check: {found['name']}", 1e3 * found["wall_s"], "ms")
            for found in summary(taken, against="step")
        ),
    ]


def _host_time(name: str, launch: Launch, settings: Settings) -> list[Row]:
    """Time steps of a model so narrow that they are bound by the host, at two depths."""
    preset, rows = PRESETS[name], []
    depths = (1, 3) if settings.small else (4, 12)
    for stage in (1, 3):
        measured, planned = [], []
        for depth in depths:
            words = (*TINY, *SMALL_IMAGES[preset.path], f"parallel.zero_stage={stage}")
            sizes = ("training.batch_size=1", "training.micro_batch_size=1")
            plain = ("training.precision=bf16", "parallel.activation_checkpointing=none")
            keys = (*words, *sizes, *plain, f"model.num_layers={depth}")
            with job(launch, settings) as context:
                trainer = Trainer(read_config(preset.path, keys), context)
                trainer.step()
                synchronize(context.device)
                rounds = 2 if settings.small else 20
                measured.append(seconds_of(trainer.enqueue, context.device, rounds=rounds))
                planned.append(planned_time(trainer.objective, context.device).host)
                stacks = [plan.stack for plan in trainer.objective.layer_plans() if plan.stack]
                carries = any(stack.core.carried_names for stack in stacks)
        rows.append(host_row(name, carries, stage, depths, measured, planned))
    return rows


def refit(launch: Launch, settings: Settings) -> list[Row]:
    """Suggest constants for `megavis/planning`; nothing is changed."""
    found = {number: read_stage(settings.folder, number) for number in (1, 5, 8)}
    rows = {number: stage.rows if stage else [] for number, stage in found.items()}
    device = planned_device(torch.cuda.get_device_name()) if settings.on_gpu else None
    return suggestions(rows, device)
