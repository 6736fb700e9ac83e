"""`kill -9` at random moments, while training and while saving, loses nothing that was saved."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.folder import latest_checkpoint, saved_steps
from megavis.checkpoint.manifest import read_manifest
from megavis.data.files import sha256_of_file
from megavis.parallel.launch import read_launch

KILLS = 10


def train_alone(path: str, overrides: list[str]) -> None:
    train_run(read_launch({}), path, overrides)


@pytest.fixture(scope="module")
def start() -> Any:
    """Start trainings from a server that has imported everything, so that each begins at once."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["megavis.training.run", "run_jobs"])

    def begin(path: Path, overrides: list[str]) -> Any:
        process = server.Process(target=train_alone, args=(str(path), overrides))
        process.start()
        return process

    return begin


def assert_everything_listed_is_whole(run_folder: Path) -> None:
    for step in saved_steps(run_folder):
        folder = run_folder / "checkpoints" / f"step-{step:08d}"
        for name, stored in read_manifest(folder).files.items():
            assert sha256_of_file(folder / name) == stored.sha256


def test_ten_kills_leave_the_unbroken_runs_metrics(
    start: Any, tiny_config: Path, tmp_path: Path
) -> None:
    # A checkpoint a step: about half of the time goes into saving, so kills hit both.
    words = [f"output={tmp_path}", "checkpoint.every=1", "checkpoint.keep_last=2"]
    words += ["training.steps=100", "training.validate_every=20", "training.validation_images=16"]
    unbroken = start(tiny_config, [*words, "name=unbroken"])
    begin = time.monotonic()
    unbroken.join(120)
    whole = time.monotonic() - begin
    assert unbroken.exitcode == 0

    draw = random.Random(0)
    run_folder = tmp_path / "killed"
    seen, killed = [], 0
    for _ in range(KILLS):
        process = start(tiny_config, [*words, "name=killed"])
        process.join(draw.uniform(0.1, 0.25) * whole)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
        latest = latest_checkpoint(run_folder)
        seen.append(read_manifest(latest).step if latest else 0)
        assert_everything_listed_is_whole(run_folder)
    assert killed >= KILLS - 2, "the runs ended before they could be killed"
    assert 0 < seen[KILLS // 2] < 100, "no kill hit a run in the middle"
    assert seen == sorted(seen), "a kill took away a checkpoint that had been there"
    final = start(tiny_config, [*words, "name=killed"])
    final.join(120)
    assert final.exitcode == 0
    assert deterministic_metrics(run_folder) == deterministic_metrics(tmp_path / "unbroken")
    last = {
        name: sha256_of_file(
            tmp_path / name / "checkpoints" / "step-00000100" / "rank-00000.safetensors"
        )
        for name in ("killed", "unbroken")
    }
    assert last["killed"] == last["unbroken"]
