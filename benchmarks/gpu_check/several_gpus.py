"""Stage 10: two to eight GPUs: links, layouts, saves, and the host's time."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.gpu_check.kernels import seconds_of, synchronize
from benchmarks.gpu_check.models import CONFIGS, TINY, job, read_config, write_palette_shards
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.training import Trainer
from benchmarks.gpu_check.whole_run import result_of
from benchmarks.gpu_check.zero_stages import LIMITS, largest_difference
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.parallel.launch import Launch, free_port
from megavis.planning.layouts import layout_name, legal_layouts, with_layout
from megavis.training import engine
from megavis.training.job import open_job
from megavis.training.parity import (
    PERTURBED_RUNS,
    Curve,
    Noise,
    judge,
    parity_config,
    train_briefly,
)
from megavis.training.trainer import run_training

_HEADS = 8
"""Heads and layers of the compared model, so that eight processes can share either."""


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts; one GPU has none but a note."""
    if settings.processes < 2:
        return {"several GPUs": _skipped}
    found: dict[str, Measure] = {"all-reduces": _all_reduces}
    # At tiny sizes, on a CPU, each part once.
    compared, resumed = (["float32"], ["bf16"]) if settings.small else ([*LIMITS], [*LIMITS])
    for precision in compared:
        found[f"layouts, {precision}"] = functools.partial(_compare_layouts, precision)
    found["ZeRO-2, overlapping"] = _overlap
    for precision in resumed:
        found[f"resume in another layout, {precision}"] = functools.partial(_resume, precision)
    found["host time, tensor parallel"] = _host_time
    return found


def _skipped(launch: Launch, settings: Settings) -> list[Row]:
    return [Row("several GPUs", None, note="skipped: it needs two GPUs or more")]


def _meetings(launch: Launch, settings: Settings, count: int) -> list[Launch]:
    """Return a launch for each further context of this part, since a port serves one context."""
    with job(launch, settings) as context:
        ports: list[Any] = [free_port() for _ in range(count)]
        dist.broadcast_object_list(ports, src=0, group=context.world.group)
    return [replace(launch, master_port=port) for port in ports]


def _all_reduces(launch: Launch, settings: Settings) -> list[Row]:
    """Time all-reduces of three sizes; a link carries 2 (n - 1) / n of the bytes."""
    rows, processes = [], launch.world_size
    with job(launch, settings) as context:
        for count in (1 << 8, 1 << 10) if settings.small else (1 << 18, 1 << 24, 1 << 28):
            numbers = torch.full((count,), 1.0 + context.world.rank, device=context.device)
            dist.all_reduce(numbers, group=context.world.group)
            right = bool((numbers == processes * (processes + 1) / 2).all())
            seconds = seconds_of(
                lambda numbers=numbers: dist.all_reduce(numbers, group=context.world.group),  # type: ignore[misc]
                context.device,
                rounds=2 if settings.small else 10,
            )
            name = f"all-reduce of {4 * count / 1e6:.3g} MB over {processes} processes"
            carried = 2 * (processes - 1) / processes * 4 * count
            rows.append(Row(f"{name}: sum is right", right, aim="yes", passed=right))
            rows.append(Row(f"{name}: bus bandwidth", carried / seconds / 1e9, "GB/s"))
    return rows


def chosen_layouts(config: RunConfig, num_processes: int) -> list[ParallelConfig]:
    """Return the layouts to compare: each axis of size two and of full size, alone and combined.

    Data parallelism alone is compared at every ZeRO stage, other layouts at ZeRO-1.
    """

    def is_chosen(parallel: ParallelConfig) -> bool:
        axes = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        if parallel.activation_checkpointing != "none":
            return False
        if max(axes) == 1:
            return True
        return parallel.zero_stage == 1 and (max(axes) == 2 or num_processes in axes)

    return [parallel for parallel in legal_layouts(config, num_processes) if is_chosen(parallel)]


def _compare_layouts(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    """Compare every process's losses and gradient norms with one process's."""
    folder = settings.folder / "scratch" / f"several_gpus_{precision}"
    plain = parity_config(_config(folder, precision, launch, settings))
    layouts = chosen_layouts(plain, launch.world_size)
    layouts = layouts[::4] if settings.small else layouts
    places = iter(_meetings(launch, settings, 2 * len(layouts)))
    steps = 2 if settings.small else 20
    train = functools.partial(train_briefly, steps=steps, device=settings.device)
    alone: list[Curve] = []
    if launch.rank == 0:
        # The other processes wait in the first layout meanwhile.
        single = Launch(0, 1, 0, launch.master_address, launch.master_port)
        alone = [train(single, plain, change=each) for each in (None, *range(PERTURBED_RUNS))]
    rows = []
    for parallel in layouts:
        curve = train(next(places), with_layout(plain, parallel))
        curves = _gathered(curve, next(places), settings)
        if launch.rank != 0:
            continue
        noise = Noise.of(alone[1:], alone[0])
        found = judge(layout_name(parallel), curves, alone[0], noise, LIMITS[precision])
        rows.append(
            Row(
                f"{precision}, {found.layout} against one process: loss of {steps} steps",
                found.loss_difference,
                aim=f"≤ {found.loss_tolerance:.1e}",
                passed=found.passed,
                note=found.error,
                detail=found.as_json(),
            )
        )
    return rows


def _gathered(curve: Curve, launch: Launch, settings: Settings) -> list[Curve]:
    with job(launch, settings) as context:
        gathered: list[Any] = [None] * launch.world_size
        dist.all_gather_object(gathered, curve, group=context.world.group)
    return gathered


def _config(
    folder: Path, precision: str, launch: Launch, settings: Settings, *words: str
) -> RunConfig:
    """Return a config of a demo that eight processes can share; rank 0 writes its shards.

    The others need them only after all processes have joined.
    """
    side, images = (4, 16) if settings.small else (12, 64)
    if launch.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_palette_shards(folder, count=images, size=side)
    sizes = (
        *(TINY if settings.small else (f"model.hidden_size={16 * _HEADS}",)),
        f"model.num_attention_heads={_HEADS}",
        f"model.num_layers={2 if settings.small else _HEADS}",
        "training.batch_size=16",
        f"training.micro_batch_size={4 if settings.small else 1}",
        "parallel.zero_stage=1",
    )
    data = (f"data.train={folder / 'palette'}", "data.validation=null", f"data.image_size={side}")
    path = CONFIGS / "igpt/demo.yaml"
    return load_config(path, (*data, *sizes, f"training.precision={precision}", *words)).config


def _overlap(launch: Launch, settings: Settings) -> list[Row]:
    """Compare bf16 at ZeRO-2 with DeepSpeed's second stream for communication and without it."""
    settings_of = engine.deepspeed_config
    losses: dict[bool, list[float]] = {}
    places = _meetings(launch, settings, 2)
    for overlaps, place in zip((False, True), places, strict=True):

        def changed(*args: Any, overlaps: bool = overlaps, **options: Any) -> dict[str, Any]:
            found = settings_of(*args, **options)
            found["zero_optimization"]["overlap_comm"] = overlaps
            return found

        with patch.object(engine, "deepspeed_config", changed):
            losses[overlaps] = _losses(place, settings, "parallel.zero_stage=2")
    difference, limit = largest_difference(losses[True], losses[False]), LIMITS["bf16"]
    return [
        Row(
            f"bf16, ZeRO-2, overlap_comm on against off: loss of {len(losses[True])} steps",
            difference,
            aim=f"≤ {limit:g}",
            passed=difference <= limit,
            note="off by default until this has passed",
            detail={"on": losses[True], "off": losses[False]},
        )
    ]


def _losses(launch: Launch, settings: Settings, *words: str) -> list[float]:
    words = ("training.precision=bf16", f"training.batch_size={4 * launch.world_size}", *words)
    words = (*words, "training.micro_batch_size=2", *(TINY if settings.small else ()))
    with job(launch, settings) as context:
        trainer = Trainer(read_config("igpt/demo.yaml", words), context)
        steps = range(3 if settings.small else 50)
        return [trainer.engine.mean_over_data(trainer.enqueue()) for _ in steps]


def _resume(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    """Train a whole run at ZeRO-3; then resume from the middle with other axes, at ZeRO-1."""
    folder = settings.folder / "scratch" / f"several_gpus_resume_{precision}"
    steps = 4 if settings.small else 20
    words = (
        f"output={folder}",
        f"training.steps={steps}",
        "training.validate_every=0",
        "training.log_every=1",
        "schedule.warmup_steps=1",
        f"checkpoint.every={steps // 2}",
    )
    if launch.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    config = _config(folder, precision, launch, settings, *words)
    first, second = _meetings(launch, settings, 2)
    whole = config.model_copy(update={"name": "whole", "parallel": ParallelConfig(zero_stage=3)})
    run_training(whole, first, device=settings.device)
    if launch.rank == 0:
        _copy_half(folder / "whole", folder / "moved", steps // 2)
    rest = ParallelConfig(zero_stage=1, tensor_model_parallel_size=2)
    moved = config.model_copy(update={"name": "moved", "parallel": rest})
    run_training(moved, second, device=settings.device)
    if launch.rank != 0:
        return []
    found, wanted = (
        [line["loss"] for line in result_of(folder / name)[0]] for name in ("moved", "whole")
    )
    difference, limit = largest_difference(found, wanted), LIMITS[precision]
    return [
        Row(
            f"{precision}, saved at ZeRO-3, resumed as {layout_name(rest)}:"
            f" loss of {len(found)} steps",
            difference,
            aim=f"≤ {limit:g}",
            passed=difference <= limit,
            detail={"losses": found, "wanted": wanted},
        )
    ]


def _copy_half(source: Path, target: Path, step: int) -> None:
    """Copy a run folder with its checkpoint of `step` as the newest."""
    shutil.copytree(source, target)
    for each in (target / "checkpoints").glob("step-*"):
        if int(each.name.removeprefix("step-")) > step:
            shutil.rmtree(each)
    (target / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")


def _host_time(launch: Launch, settings: Settings) -> list[Row]:
    """Time steps of a model so narrow that they are bound by the host, at two depths."""
    rows, depths = [], (1, 3) if settings.small else (4, 12)
    places = iter(_meetings(launch, settings, 2 * len(depths)))
    for sequence in (False, True):
        found = [_step_seconds(next(places), settings, depth, sequence) for depth in depths]
        block = 1e3 * (found[1] - found[0]) / (depths[1] - depths[0])
        name = f"TP {launch.world_size}{', sequence parallel' if sequence else ''}"
        note = "with plain kernels; includes waiting for the other processes"
        rows.append(Row(f"{name}: host time of a block and step", block, "ms", note=note))
    return rows


def _step_seconds(launch: Launch, settings: Settings, depth: int, sequence: bool) -> float:
    words = (
        *TINY,
        f"model.num_attention_heads={_HEADS}",
        f"model.num_layers={depth}",
        "data.image_size=4",
        "training.precision=bf16",
        "training.batch_size=1",
        "training.kernels=torch",
        "parallel.zero_stage=1",
        f"parallel.tensor_model_parallel_size={launch.world_size}",
        f"parallel.sequence_parallel={str(sequence).lower()}",
    )
    config = read_config("igpt/demo.yaml", words)
    with open_job(config, launch, device=settings.device) as context:
        trainer = Trainer(config, context)
        trainer.step()
        synchronize(context.device)
        return seconds_of(trainer.enqueue, context.device, rounds=2 if settings.small else 20)
