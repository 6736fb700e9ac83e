"""Stage 7: throughput of the loader, alone and during training; stall of a save."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Mapping

import torch

from benchmarks.gpu_check.kernels import seconds_of, synchronize
from benchmarks.gpu_check.models import job, write_jpeg_shards
from benchmarks.gpu_check.presets import PRESETS, VARIANTS, config_of
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.training import Trainer
from benchmarks.loader import Stopwatch, row
from megavis.config.schema import RunConfig
from megavis.data.codecs.transforms import training_transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.parallel.launch import Launch

_WANTED: Mapping[str, float] = {"DARL ViT-H": 330.0, "GVP-B": 1830.0}
"""Estimated images/s that a preset consumes."""


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    return {"loader": loader_alone, "loader beside a step": loader_beside, "save": save}


def _loader(config: RunConfig, settings: Settings) -> BatchLoader:
    count = 16 if settings.small else 512
    shards = write_jpeg_shards(settings.folder / "scratch" / "jpeg", count=count)
    return BatchLoader(
        ShardDataset(shards, training_transform(config.data, seed=config.seed)),
        seed=config.seed,
        micro_batch_size=config.training.batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        threads=os.cpu_count() or 1,
    )


def loader_alone(launch: Launch, settings: Settings) -> list[Row]:
    """Read with as many threads as there are cores."""
    rows = []
    for name, wanted in _WANTED.items():
        config = config_of(PRESETS[name], VARIANTS["ZeRO-1"], settings)
        with _loader(config, settings) as loader:
            rounds = 4 if settings.small else 40
            seconds = seconds_of(lambda: next(loader), torch.device("cpu"), rounds=rounds)  # noqa: B023
        rate = config.training.batch_size / seconds
        passed = None if settings.small else rate >= wanted
        title = f"loader alone, {name}, {os.cpu_count()} threads"
        rows.append(Row(title, rate, "images/s", f"≥ {wanted:g}", passed, "500x375 JPEGs"))
    return rows


def loader_beside(launch: Launch, settings: Settings) -> list[Row]:
    """Train GVP-B from the loader, and on a single batch in memory."""
    rows, config = [], config_of(PRESETS["GVP-B"], VARIANTS["ZeRO-1"], settings)
    with job(launch, settings) as context, _loader(config, settings) as loader:
        engine = Trainer(config, context).engine
        num_steps = 3 if settings.small else 30
        same = itertools.repeat(next(loader))
        for name, batches in (("the loader", loader), ("one batch", same)):
            found = row(name, engine, Stopwatch(batches), num_steps)
            rate = config.training.batch_size / float(str(found["step_s"]))
            title = f"GVP-B's step, batches from {name}"
            rows.append(Row(f"{title}: rate", rate, "images/s", detail=found))
            waiting = 100 * float(str(found["share"]))
            rows.append(Row(f"{title}: waiting", waiting, "% of the time", "≤ 1"))
    return rows


def save(launch: Launch, settings: Settings) -> list[Row]:
    """Time a checkpoint of iGPT-XL's six blocks, and copies to the host of the same size."""
    config = config_of(PRESETS["iGPT-XL, 6 of 60 blocks"], VARIANTS["ZeRO-1"], settings)
    folder = settings.folder / "scratch" / "save"
    with job(launch, settings) as context:
        trainer = Trainer(config, context)
        trainer.step()
        began = time.perf_counter()
        trainer.prepare_snapshots()
        prepared = time.perf_counter() - began
        synchronize(context.device)
        began = time.perf_counter()
        snapshot = trainer.snapshot(folder)
        stalled = time.perf_counter() - began
        snapshot.write()
        snapshot.publish()
        written = time.perf_counter() - began - stalled
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        shutil.rmtree(folder)
        copies = _copies(min(num_bytes, 2 << 30), context.device)
    size = f"{num_bytes / 1e9:.3g} GB"
    aim = "0.78 s (torch's asynchronous checkpoints, 1,856 H200)"
    return [
        Row(f"save of {size}: training stalls", stalled, "s", aim),
        Row(f"save of {size}: written after that", written, "s"),
        Row(f"save of {size}: memory made ready after the first step", prepared, "s"),
        *copies,
    ]


def _copies(num_bytes: int, device: torch.device) -> list[Row]:
    source = torch.ones(max(num_bytes // 4, 1), device=device)
    rows = []
    for kind in ("pageable", "pinned"):
        pinned = kind == "pinned"
        if pinned and device.type != "cuda":
            rows.append(Row("copy to pinned memory", None, "GB/s", note="no GPU to pin it for"))
            continue
        target = torch.empty(len(source), pin_memory=pinned)
        seconds = seconds_of(lambda t=target: t.copy_(source), device, rounds=3)  # type: ignore[misc]
        rows.append(Row(f"copy to {kind} memory", 4e-9 * len(source) / seconds, "GB/s"))
    return rows
