"""Rollback after loss spikes skips the bad batches, as if they were not in the data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps
from megavis.checkpoint.format.manifest import read_manifest
from megavis.data.loading.loader import BatchLoader
from megavis.data.loading.order import SampleOrder
from megavis.parallel.launch import Launch
from megavis.parallel.workers import WorkerError
from megavis.training.engine import Engine
from megavis.training.faults import watchdog

pytestmark = pytest.mark.once

BATCH = 8
# Steps 14 to 16; the newest checkpoint at least two steps before 14 is that of step 8.
BAD = range(13 * BATCH, 16 * BATCH)
BACK_AT, BEYOND = 8, 18
WORDS = [
    "training.steps=24",
    "training.spike_threshold=20",
    "training.spike_window=8",
    "training.max_bad_steps=3",
    "training.max_rollbacks=1",
    "training.rollback_margin=2",
]


def train_on_bad_data(launch: Launch, path: str, words: list[str], crash_at: int) -> None:
    """Train; the loss of images at bad positions is 50 times too large.

    Crashes the second time that step `crash_at` is run, which is after the rollback.
    """
    step, following = Engine.train_step, BatchLoader.__next__
    seen: list[torch.Tensor] = []
    met: list[int] = []

    def note(loader: BatchLoader) -> Any:
        batch = following(loader)
        seen[:] = [batch.sample_index]
        return batch

    def with_bad_loss(engine: Engine, batches: Any, number: int) -> torch.Tensor:
        met.append(number + 1)
        if met.count(crash_at) == 2:
            raise RuntimeError("a crash")
        real = engine.objective.loss

        def loss(predictions: Any, targets: Any) -> torch.Tensor:
            is_bad = any(int(position) in BAD for position in seen[0])
            return real(predictions, targets) * (50.0 if is_bad else 1.0)

        engine.deepspeed.module.loss = loss
        if engine.context.pipeline.size > 1:
            engine.deepspeed.module.loss_fn = loss
        return step(engine, batches, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchLoader, "__next__", note)
        patch.setattr(Engine, "train_step", with_bad_loss)
        patch.setattr(watchdog, "_BEAT_SECONDS", 0.1)  # four before a failure is passed on
        train_run(launch, path, words)


def train_without_it(launch: Launch, path: str, words: list[str]) -> None:
    """Train on data without the batches from step 9 to two steps after the bad images."""
    index = SampleOrder.dataset_index

    def shorter(order: SampleOrder, positions: np.ndarray) -> np.ndarray:
        later = (BEYOND - BACK_AT) * BATCH
        return index(order, positions + np.where(positions >= BACK_AT * BATCH, later, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleOrder, "dataset_index", shorter)
        train_run(launch, path, words)


@pytest.fixture(scope="module")
def reference(run_job: Any, tiny_config: Path, tmp_path_factory: Any) -> list[dict[str, float]]:
    output = tmp_path_factory.mktemp("reference")
    run_job(train_without_it, 2, str(tiny_config), [*WORDS, f"output={output}"])
    return deterministic_metrics(output / "tiny")


@pytest.mark.parametrize(
    ("layout", "resumed", "exact"),
    [
        ("zero_stage=1", "", True),
        ("zero_stage=3", "tensor_model_parallel_size=2", False),
        ("zero_stage=0", "", False),
    ],
)
def test_rollback_equals_training_without_bad_batches(
    run_job: Callable[..., Any],
    tiny_config: Path,
    tmp_path: Path,
    reference: list[dict[str, float]],
    layout: str,
    resumed: str,
    exact: bool,
) -> None:
    words = [*WORDS, f"output={tmp_path}"]
    job = (str(tiny_config), [*words, f"parallel.{layout}"])
    if resumed:
        # Crash before the first new checkpoint: the old one must record the rollback.
        with pytest.raises(WorkerError, match="a crash"):
            run_job(train_on_bad_data, 2, *job, BACK_AT + 2)
        job = (str(tiny_config), [*words, f"parallel.{resumed}"])
    run_job(train_on_bad_data, 2, *job, 0)

    lines = deterministic_metrics(tmp_path / "tiny")
    events = [line for line in lines if "rolled_back_from" in line]
    assert events == [
        {
            "step": BACK_AT,
            "rolled_back_from": 16,
            "first_bad_step": 14,
            "times_gone_back": 1,
            "batches_skipped": BEYOND - BACK_AT,
        }
    ]
    lines.remove(events[0])
    assert [line["step"] for line in lines] == list(range(25))[1:]
    for ours, theirs in zip(lines, reference, strict=True):
        assert ours == (theirs if exact else pytest.approx(theirs, rel=1e-5))
    latest = latest_checkpoint(tmp_path / "tiny")
    assert latest is not None
    assert read_manifest(latest).batches_skipped == BEYOND - BACK_AT
    # The checkpoints of the spike are kept under another name.
    assert saved_steps(tmp_path / "tiny") == [4, 8, 12, 16, 20, 24]
    assert list((tmp_path / "tiny" / "checkpoints").glob("*.set-aside"))


def test_loss_spikes_are_counted(
    run_job: Callable[..., Any], tiny_config: Path, tmp_path: Path
) -> None:
    words = [*WORDS, f"output={tmp_path}", "training.max_bad_steps=0", "training.max_rollbacks=0"]
    run_job(train_on_bad_data, 2, str(tiny_config), [*words, "training.log_every=8"], 0)
    lines = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").open()]
    assert {line["step"]: line.get("loss_spikes", 0) for line in lines} == {8: 0, 16: 3, 24: 0}
