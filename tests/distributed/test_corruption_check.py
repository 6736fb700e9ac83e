"""Checks of replicas find a flipped bit and a process that computes wrongly."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.format.folder import saved_steps
from megavis.parallel.launch import Launch
from megavis.parallel.workers import WorkerError
from megavis.training.engine import Engine
from megavis.training.faults import watchdog
from megavis.training.provenance import read_faults

pytestmark = pytest.mark.once

NORM = "blocks.1.input_layernorm.weight"


def train_with_fault(launch: Launch, path: str, words: list[str], fault: str, at: int) -> None:
    """Train; inject a silent fault on rank 1 after step `at`."""
    step = Engine.train_step

    def with_fault(engine: Engine, batches: Any, number: int) -> torch.Tensor:
        loss = step(engine, batches, number)
        if launch.rank == 1 and number + 1 == at:
            inject(engine, fault)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", with_fault)
        patch.setattr(watchdog, "_BEAT_SECONDS", 0.1)  # a failure is reported after four
        # As launch/slurm_step.sh and SLURM set them.
        patch.setenv("MEGAVIS_FAULTY_NODES", words[0].removeprefix("output=") + "/faulty")
        patch.setenv("SLURMD_NODENAME", f"node{launch.rank}")
        train_run(launch, path, words)


def inject(engine: Engine, fault: str) -> None:
    if fault == "bit":
        weight = dict(engine.layers.named_parameters())[NORM]
        bits = getattr(weight, "ds_tensor", weight).data.view(torch.int32)
        bits[3] ^= 1
        return
    real, calls = engine.objective.loss, []

    def wrong(*words: Any) -> torch.Tensor:
        calls.append(1)
        is_wrong = fault == "loss" or len(calls) % 2
        return torch.nextafter(real(*words), torch.tensor(9.0)) if is_wrong else real(*words)

    engine.objective.loss = wrong


@pytest.mark.parametrize(
    ("layout", "fault", "at", "message", "nodes"),
    [
        # ZeRO 1 and 2 would overwrite the weight in the next step; ZeRO 0 keeps it.
        (
            *("zero_stage=0", "bit", 5),
            *(rf"after step 6, {NORM} differs between rank 0 on \S+, rank 1", ""),
        ),
        ("zero_stage=1", "loss", 8, "after step 8, the loss in part 0 of the model differs", ""),
        (
            *("zero_stage=1", "two losses", 8),
            *(r"after step 8, two passes .* give two losses on rank 1", "node1\n"),
        ),
    ],
)
def test_corruption_is_reported_and_not_saved(
    run_job: Callable[..., Any],
    tiny_config: Path,
    tmp_path: Path,
    layout: str,
    fault: str,
    at: int,
    message: str,
    nodes: str,
) -> None:
    words = [f"output={tmp_path}", f"parallel.{layout}", "training.check_replicas_every=3"]
    with pytest.raises(WorkerError, match=message):
        run_job(train_with_fault, 2, str(tiny_config), words, fault, at)
    (fault,) = read_faults(tmp_path / "tiny")
    assert re.search(message, f"after step {fault['step']}, {fault['what']}")
    assert (tmp_path / "faulty").read_text() == nodes
    # The checkpoint of step 4 may not have been finished.
    assert set(saved_steps(tmp_path / "tiny")) <= {4}


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (4, ("tensor_model_parallel_size=2", "zero_stage=3")),
        (2, ("pipeline_model_parallel_size=2",)),
        (4, ("pipeline_model_parallel_size=2", "zero_stage=3")),
        (2, ("context_parallel_size=2",)),
    ],
)
def test_agreeing_processes_continue(
    run_job: Callable[..., Any],
    tiny_config: Path,
    tmp_path: Path,
    processes: int,
    layout: tuple[str, ...],
) -> None:
    words = [f"output={tmp_path}", *(f"parallel.{word}" for word in layout)]
    words += ["training.check_replicas_every=1", "training.steps=3", "schedule.warmup_steps=1"]
    run_job(train_run, processes, str(tiny_config), words)
    assert len(deterministic_metrics(tmp_path / "tiny")) == 3
