"""`kill -9` at random times, while training and while saving, loses no saved checkpoint."""

import gc
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps
from megavis.checkpoint.format.manifest import read_manifest
from megavis.data.format.files import sha256_of_file
from megavis.parallel.launch import read_launch
from megavis.training.engine import Engine

pytestmark = pytest.mark.once

KILLS = 10
HANGS_AFTER = 600
"""Timeout in seconds."""


def train_alone(path: str, overrides: list[str], stop_at: float) -> None:
    """Train; sleep from step `stop_at` on, so that the run cannot end before it is killed."""
    torch.set_num_threads(1)
    gc.freeze()  # keep the collector from scanning imported modules
    step = Engine.train_step

    def train_step(engine: Engine, batches: Any, number: int) -> torch.Tensor:
        while number >= stop_at:
            time.sleep(1)
        return step(engine, batches, number)

    Engine.train_step = train_step  # type: ignore[method-assign]
    train_run(read_launch({}), path, overrides)


@pytest.fixture(scope="module")
def start() -> Any:
    """Start training in forks of a server that has imported everything."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["megavis.training.trainer"])

    def begin(path: Path, overrides: list[str], stop_at: float = math.inf) -> Any:
        process = server.Process(target=train_alone, args=(str(path), overrides, stop_at))
        process.start()
        return process

    return begin


def assert_checkpoints_are_intact(run_folder: Path) -> None:
    for step in saved_steps(run_folder):
        folder = run_folder / "checkpoints" / f"step-{step:08d}"
        for name, stored in read_manifest(folder).files.items():
            assert sha256_of_file(folder / name) == stored.sha256


def wait_for_step(process: Any, run_folder: Path, step: int) -> None:
    """Wait until the run has saved step `step`, or has ended."""
    end = time.monotonic() + HANGS_AFTER
    while process.is_alive() and max([0, *saved_steps(run_folder)]) < step:
        assert time.monotonic() < end, f"the run did not reach step {step}"
        time.sleep(0.005)


def test_killed_run_equals_uninterrupted_run(start: Any, tiny_config: Path, tmp_path: Path) -> None:
    # With a checkpoint per step, saving takes about half of the time, so kills hit both.
    words = [f"output={tmp_path}", "checkpoint.every=1", "checkpoint.keep_last=2"]
    words += ["training.steps=60", "training.validate_every=20", "training.validation_images=16"]
    unbroken = start(tiny_config, [*words, "name=unbroken"])
    unbroken.join(HANGS_AFTER)
    assert unbroken.exitcode == 0

    draw = random.Random(0)
    run_folder = tmp_path / "killed"
    seen = []
    for _ in range(KILLS):
        step = (seen[-1] if seen else 0) + draw.randint(1, 4)
        # Leave room for the kill to hit a later step or save.
        process = start(tiny_config, [*words, "name=killed"], step + 2)
        wait_for_step(process, run_folder, step)
        time.sleep(draw.uniform(0.0, 0.05))
        assert process.is_alive(), "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        latest = latest_checkpoint(run_folder)
        seen.append(read_manifest(latest).step if latest else 0)
        assert_checkpoints_are_intact(run_folder)
    assert seen == sorted(seen), "a kill removed a checkpoint"
    final = start(tiny_config, [*words, "name=killed"])
    final.join(HANGS_AFTER)
    assert final.exitcode == 0
    assert deterministic_metrics(run_folder) == deterministic_metrics(tmp_path / "unbroken")
    last = {
        name: sha256_of_file(
            tmp_path / name / "checkpoints" / "step-00000060" / "rank-00000.safetensors"
        )
        for name in ("killed", "unbroken")
    }
    assert last["killed"] == last["unbroken"]
