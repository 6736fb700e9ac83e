"""The moving average of weights (EMA) in every kind of layout: formula, validation, resuming."""

from pathlib import Path
from typing import Any

import pytest
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.format.tensor_reader import CheckpointReader, read_weights

pytestmark = pytest.mark.once

WORDS = [
    *("optimizer.ema_decay=0.5", "training.steps=4", "training.validate_every=2"),
    *("schedule.decay=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0.1"),
]
LAYOUTS = [
    (2, {"zero_stage": 1}),
    (4, {"zero_stage": 3, "tensor_model_parallel_size": 2}),
    (4, {"zero_stage": 1, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    (4, {"zero_stage": 3, "pipeline_model_parallel_size": 2}),
]


def parts_of(folder: Path, step: int, kind: str) -> dict[str, Any]:
    """Return the checkpoint's tensors of a kind, such as `weight` or `average`."""
    with CheckpointReader(step_folder(folder, step)) as reader:
        keys = [key for key in reader.manifest.tensors if key.startswith(f"{kind}/")]
        return {key.partition("/")[2]: reader.read(key) for key in keys}


@pytest.fixture(scope="module")
def reference(run_job: Any, tiny_config: Path, tmp_path_factory: Any) -> Path:
    """A run on one process at ZeRO-0 that saves every step."""
    root = tmp_path_factory.mktemp("average")
    words = [*WORDS, f"output={root}", "name=one", "parallel.zero_stage=0", "checkpoint.every=1"]
    run_job(train_run, 1, str(tiny_config), words)
    return root / "one"


def check_by_formula(folder: Path) -> None:
    """Compare the average after four steps with the formula on the weights of each step."""
    weights = [parts_of(folder, step, "weight") for step in range(1, 5)]
    averages = parts_of(folder, 4, "average")
    assert averages.keys() == weights[0].keys()
    for name, average in averages.items():
        expected = weights[0][name]
        for later in weights[1:]:
            expected = 0.5 * expected + 0.5 * later[name]
        assert (average - expected).abs().max() <= 1e-6, name
    # Opening the run reads the average.
    opened = read_weights(step_folder(folder, 4))
    assert all((opened[name] == average).all() for name, average in averages.items())


def validation_losses(folder: Path) -> list[float]:
    name, lines = "validation_loss", deterministic_metrics(folder)
    return [line[name] for line in lines if name in line]


def test_ema_matches_formula(reference: Path) -> None:
    check_by_formula(reference)


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
def test_ema_in_every_layout(
    run_job: Any, tiny_config: Path, reference: Path, processes: int, layout: dict[str, Any]
) -> None:
    name = f"layout-{processes}-{layout['zero_stage']}"
    words = [*WORDS, f"output={reference.parent}", f"name={name}", "checkpoint.every=1"]
    # The first half runs in the layout, the second on one process at ZeRO-2.
    there = [f"parallel.{key}={value}" for key, value in layout.items()]
    run_job(train_run, processes, str(tiny_config), [*words, *there, "training.steps=2"])
    run_job(train_run, 1, str(tiny_config), [*words, "parallel.zero_stage=2"])
    check_by_formula(reference.parent / name)
    losses = validation_losses(reference.parent / name)
    assert losses == pytest.approx(validation_losses(reference), rel=1e-5)


def test_validation_uses_ema_weights(run_job: Any, tiny_config: Path, reference: Path) -> None:
    words = [*WORDS[1:], f"output={reference.parent}"]
    plain = [*words, "name=plain", "parallel.zero_stage=0"]
    run_job(train_run, 1, str(tiny_config), plain)
    with_average, without = (
        {line["step"]: line for line in deterministic_metrics(folder)}
        for folder in (reference, reference.parent / "plain")
    )
    for step in range(1, 5):
        assert with_average[step]["loss"] == without[step]["loss"]
    assert with_average[4]["validation_loss"] != without[4]["validation_loss"]
