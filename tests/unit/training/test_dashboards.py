"""Offline dashboards log the same values as `metrics.jsonl` and survive a resume."""

import json

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.training import metrics
from megavis.training.metrics import (
    DASHBOARDS,
    Dashboard,
    MetricsWriter,
    check_dashboards,
    read_metrics,
)

pytestmark = pytest.mark.once
CONFIG = {"name": "small", "training.steps": 3}


@pytest.fixture
def train_twice(tmp_path, monkeypatch):
    """Write steps 1 and 2, then resume from step 1 and write steps 2 and 3 with other losses."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def train_twice(kind):
        folder = tmp_path / "small"
        folder.mkdir()
        for first, steps in ((0, (1, 2)), (1, (2, 3))):
            writer = MetricsWriter(folder, first_step=first, logging=(kind,), config=CONFIG)
            for step in steps:
                writer.write(step, {"loss": 10.0 * first + step})
            writer.image(steps[-1], "samples", np.zeros((4, 4, 3), np.uint8))
            writer.close()
        assert [line["loss"] for line in read_metrics(folder)] == [1.0, 12.0, 13.0]
        return folder

    return train_twice


def test_tensorboard_replaces_steps_after_a_resume(train_twice):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(train_twice("tensorboard") / "tensorboard"))
    events.Reload()
    assert {scalar.step: scalar.value for scalar in events.Scalars("loss")} == {1: 1, 2: 12, 3: 13}


def test_tensorboard_after_a_kill(tmp_path):
    """A process that is killed closes nothing, and may be in the middle of a record."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed = MetricsWriter(tmp_path, first_step=0, logging=("tensorboard",), config=CONFIG)
    for step in (1, 2, 3):
        killed.write(step, {"loss": float(step)})
    (events,) = (tmp_path / "tensorboard").iterdir()
    for path in (events, tmp_path / "metrics.jsonl"):
        path.write_bytes(path.read_bytes()[:-9])
    resumed = MetricsWriter(tmp_path, first_step=2, logging=("tensorboard",), config=CONFIG)
    for step in (3, 4):
        resumed.write(step, {"loss": 10.0 * step})
    resumed.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = {1: 1, 2: 2, 3: 30, 4: 40}
    assert {scalar.step: scalar.value for scalar in events.Scalars("loss")} == expected
    assert {line["step"]: line["loss"] for line in read_metrics(tmp_path)} == expected


def test_wandb_resumes_the_same_run(train_twice):
    pytest.importorskip("wandb", reason="pip install 'megavis[wandb]'")
    folder = train_twice("wandb")
    identity = json.loads((folder / metrics.IDENTITIES).read_text())["wandb"]
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {path.stem.removeprefix("run-") for path in files} == {identity}


def test_wandb_does_not_wait_for_its_server_forever(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install 'megavis[wandb]'")
    if not hasattr(wandb.Settings(), "finish_timeout"):
        pytest.skip("this version of wandb has no limit for the upload at the end")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    board = DASHBOARDS["wandb"](tmp_path, first_step=0, config=CONFIG)
    assert board._run.settings.finish_timeout == 300
    board.close()


def test_mlflow_resumes_the_same_run(train_twice):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'megavis[mlflow]'")
    folder = train_twice("mlflow")
    client = mlflow.MlflowClient((folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("megavis").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [
        (1, 1.0),
        (2, 2.0),
        (2, 12.0),
        (3, 13.0),
    ]
    assert list((folder / "mlflow").rglob("samples-00000003.png"))
    assert run.data.params["training.steps"] == "3"
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")


def test_jsonl_only_writes_no_dashboard(train_twice):
    assert [path.name for path in train_twice("jsonl").iterdir()] == ["metrics.jsonl"]


def test_missing_package_raises(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "wandb" else name)
    check_dashboards(("tensorboard", "mlflow", "jsonl"))
    with pytest.raises(UserError, match=r"pip install 'megavis\[wandb\]'"):
        check_dashboards(("wandb",))


class Broken(Dashboard):
    """A dashboard that opens and fails on every call."""

    package = "tensorboard"

    def __init__(self, run_folder, *, first_step, config):
        pass

    def scalars(self, step, values):
        raise RuntimeError(f"no answer after step {step}")

    def image(self, step, name, pixels):
        raise RuntimeError("asked again")

    def close(self):
        raise RuntimeError("asked again")


def test_training_gives_up_a_dashboard_that_fails(train_twice, monkeypatch, capsys):
    """Its client may wait for minutes in every call."""
    monkeypatch.setitem(DASHBOARDS, "wandb", Broken)
    train_twice("wandb")
    errors = capsys.readouterr().err
    assert errors.count("WARNING") == 2
    assert "no answer after step 1;" in errors
    assert "no answer after step 2;" in errors


class Absent(Broken):
    """A dashboard whose server does not answer when it is opened."""

    def __init__(self, run_folder, *, first_step, config):
        raise RuntimeError("no server")


def test_training_starts_without_a_dashboard(train_twice, monkeypatch, capsys):
    monkeypatch.setitem(DASHBOARDS, "wandb", Absent)
    train_twice("wandb")
    assert capsys.readouterr().err.count("no server; training continues") == 2
