"""Learning-rate search: stopping, abandoned runs, selection and resume."""

import contextlib
import csv
import json
import math
import shutil
import sys
import weakref
from pathlib import Path

import pytest
from PIL import Image

from megavis.cli import main
from megavis.training.engine import Engine
from megavis.training.search.learning_rate import is_lost

pytestmark = pytest.mark.once
GRID = [
    "--grid",
    "optimizer.learning_rate=1e-2,1e-3",
    "--measure",
    "loss",
    "training.validate_every=1",
]


@pytest.fixture
def config(small_config, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
output: {tmp_path}/runs
optimizer: {{learning_rate: 1.0}}
training: {{steps: 30, log_every: 1, validation_images: 16}}
checkpoint: {{every: 5}}
"""
    )
    return path


def search(path, *words):
    return main(["search-lr", str(path), "--device", "cpu", *words])


def table(path):
    with (path.parent / "runs/small-search/search.csv").open() as file:
        return list(csv.DictReader(file))


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def abort_last_validation(run):
    """Leave the run as a signal during its last validation does: saved, but not validated."""
    *lines, last = metrics(run)
    lines.append({key: last[key] for key in last if not key.startswith("validation_")})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for report in run.glob("evaluation/finetune_*"):
        report.unlink()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_ends_before_the_next_one(config, monkeypatch, stage):
    """Memory is for one; DeepSpeed's ZeRO-3 would keep all modules that it has ever run."""
    engines, living = weakref.WeakSet(), []
    start = Engine.__init__

    def counted(self, *args):
        living.append(len(engines))
        start(self, *args)
        engines.add(self.deepspeed)

    monkeypatch.setattr(Engine, "__init__", counted)
    short = ["training.steps=1", "schedule.warmup_steps=0", f"parallel.zero_stage={stage}"]
    assert search(config, *short, "--rates", "1e-2,1e-3") == 0
    assert living == [0, 0]


def test_search_descends_until_the_loss_rises(config, capsys):
    # Adam's step size is the rate: 1e5 destroys the network, 1e-6 barely changes it.
    rates = ["1e-6", "1e-2", "1e5", "1e-7"]
    assert search(config, "--rates", ",".join(rates), "--patience", "3") == 0
    rows = table(config)
    assert [row["learning_rate"] for row in rows] == ["100000", "0.01", "1e-06"]
    assert [row["state"] for row in rows] == ["given up", "finished", "finished"]
    assert [row["best"] for row in rows] == ["", "yes", ""]
    losses = [float(row["validation_loss"]) for row in rows[1:]]
    assert losses[0] < losses[1], "the search must end at the first rate with a higher loss"
    runs = config.parent / "runs"
    assert not (runs / "small-lr-1e-07").exists()
    given_up = metrics(runs / "small-lr-100000")
    assert given_up[-1]["step"] == int(rows[0]["step"]) < 30
    # The table reports the run's metrics, and the run works with other commands.
    last = metrics(runs / "small-lr-0.01")[-1]
    assert (last["step"], f"{last['validation_loss']:.6f}") == (30, rows[1]["validation_loss"])
    assert main(["report", str(runs / "small-lr-0.01")]) == 0
    picture = Image.open(runs / "small-search/search.png")
    assert picture.size[0] > 300
    assert "| 0.01 | finished | 30 |" in (runs / "small-search/search.md").read_text()

    # A second search has nothing to do: abandoned runs stay abandoned.
    before = {run: metrics(run) for run in runs.glob("small-lr-*")}
    assert search(config, "--rates", ",".join(rates), "--patience", "3") == 0
    assert table(config) == rows
    assert {run: metrics(run) for run in runs.glob("small-lr-*")} == before

    # Results of another schedule must not count as this one's.
    capsys.readouterr()
    assert search(config, "--rates", ",".join(rates), "schedule.decay=constant") == 2
    message = capsys.readouterr().err
    assert "this run was trained with schedule.decay cosine, not constant" in message


@pytest.mark.parametrize("command", [["search-lr", "--rates", "1e-2,1e-3"], ["sweep", *GRID]])
def test_a_log_on_a_full_disk_ends_no_search(config, monkeypatch, command):
    """Else a launcher starts it again after each of its runs."""
    short = ["training.steps=1", "schedule.warmup_steps=0", "--device", "cpu"]
    with Path("/dev/full").open("w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        code = main([command[0], str(config), *short, *command[1:]])
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            output.close()
    assert code == 0
    [found] = config.parent.glob("runs/small-s*/*.csv")
    assert len(found.read_text().splitlines()) == 3


def test_finetuning_with_early_stopping_is_selected_by_accuracy(config):
    words = ["finetune={num_classes: 3, patience: 2}", "training.validate_every=1"]
    rates = ["--rates", "1e-1,1e-2,1e-6"]
    assert search(config, *rates, *words) == 0
    rows = table(config)
    runs = config.parent / "runs"
    for row in rows:
        assert row["state"] == "finished"
        records = metrics(runs / f"small-lr-{row['learning_rate']}")
        accuracies = [m["validation_accuracy"] for m in records if m["step"] > 0]
        assert row["validation_accuracy"] == f"{max(accuracies):.6f}"
        assert int(row["step"]) == records[-1]["step"]
    assert any(int(row["step"]) < 30 for row in rows), "no run stopped early"
    found = [float(row["validation_accuracy"]) for row in rows]
    assert [row["best"] for row in rows].index("yes") == found.index(max(found))
    # A second search has nothing to do.
    before = {run: metrics(run) for run in runs.glob("small-lr-*")}
    assert search(config, *rates, *words) == 0
    assert table(config) == rows
    assert {run: metrics(run) for run in runs.glob("small-lr-*")} == before


@pytest.mark.parametrize("diverging", ["loss", "gradients"])
def test_rate_that_diverges_between_logged_steps_is_given_up(config, monkeypatch, diverging):
    """Every step is skipped from then on, and the loss may stay finite."""
    step = Engine.train_step

    def diverge(engine, batches, number):
        real, rate = engine.objective.loss, engine.config.optimizer.learning_rate
        if rate > 1 and number >= 4:
            # The gradient of the square root is infinite at 0, and 0 * inf is not a number.
            added = {
                "loss": lambda loss: loss * math.nan,
                "gradients": lambda loss: (loss * 0).sqrt(),
            }
            engine.deepspeed.module.loss = lambda *words: (
                real(*words) + added[diverging](real(*words))
            )
        return step(engine, batches, number)

    monkeypatch.setattr(Engine, "train_step", diverge)
    words = ["training.log_every=30", "checkpoint.every=0"]
    for _ in range(2):  # the second search has nothing to do
        assert search(config, "--rates", "1.5,1e-2", *words) == 0
        rows = [(row["state"], row["step"]) for row in table(config)]
        assert rows == [("given up", "14"), ("finished", "30")]
    run = config.parent / "runs/small-lr-1.5"
    reason = json.loads((run / "given_up.json").read_text())["reason"]
    assert reason.startswith("10 steps in a row, up to step 14, were bad")


def test_interrupted_search_resumes(config):
    one = ["train", str(config), "--device", "cpu", "name=small-lr-0.003"]
    one += ["optimizer.learning_rate=3e-3", "training.validate_every=30"]
    assert main([*one, "name=whole"]) == 0

    class KilledError(Exception):
        pass

    from megavis.training.trainer import Trainer

    def kill_after_publishing(self):
        if (self.config.folder / "checkpoints" / "step-00000010").exists():
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_prune", kill_after_publishing)
        with pytest.raises(KilledError):
            search(config, "--rates", "1e-2,3e-3")
    runs = config.parent / "runs"
    assert 10 <= metrics(runs / "small-lr-0.01")[-1]["step"] < 20
    assert search(config, "--rates", "1e-2,3e-3") == 0
    assert [row["state"] for row in table(config)] == ["finished", "finished"]
    ours, whole = metrics(runs / "small-lr-0.003"), metrics(runs / "whole")
    assert [m["loss"] for m in ours if "loss" in m] == [m["loss"] for m in whole if "loss" in m]
    resumed = [m["step"] for m in metrics(runs / "small-lr-0.01")]
    assert resumed == sorted(set(resumed))
    assert resumed[-1] == 30


@pytest.mark.parametrize("tunes", [False, True])
def test_run_that_ended_before_its_last_validation_or_save_resumes(config, tunes):
    words = ["--rates", "1e-2", "training.steps=10", "training.validate_every=5"]
    words += ["finetune={num_classes: 3}"] if tunes else []
    assert search(config, *words) == 0
    run, rows = config.parent / "runs/small-lr-0.01", table(config)
    before = metrics(run)[-1]["validation_loss"]
    abort_last_validation(run)
    assert search(config, *words) == 0
    assert table(config) == rows
    assert metrics(run)[-1]["validation_loss"] == before
    assert (run / "evaluation/finetune_test.json").exists() is tunes
    # A last step that is in the metrics, but not saved, is taken again.
    (run / "checkpoints/latest").write_text("step-00000005\n")
    shutil.rmtree(run / "checkpoints/step-00000010")
    assert search(config, *words) == 0
    assert (table(config), metrics(run)[-1]["validation_loss"]) == (rows, before)
    assert (run / "checkpoints/step-00000010").exists()


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([6.2, 5.0, 4.0, 3.9, 3.8], False),
        ([6.2, 5.0, 4.0, 5.4, 5.4, 5.4], True),
        ([6.2, 5.0, 4.0, 5.4, 5.4, 4.5], False),  # recovers
        ([6.2, 5.0, 4.0, 5.0, 5.0, 5.0], False),  # less than half of the gain
        ([6.2, 6.1, 6.2, 6.3, 6.25, 6.2], False),  # plateau noise
        ([6.2, 6.6, 6.7, 6.8], True),
        ([6.2, 6.6, 6.7], False),  # too short
        ([6.2, math.nan], True),
        ([6.2, math.inf], True),
        ([], False),
    ],
)
def test_is_lost_detects_unrecovered_spikes(losses, lost):
    assert is_lost(losses, 3) is lost


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rates", "1e-2", "data.validation=null"], "set data.validation"),
        (["--rates", "0,1e-2"], "must be numbers above 0"),
    ],
)
def test_invalid_searches_are_refused(config, capsys, words, expected):
    assert search(config, *words) == 2
    assert expected in capsys.readouterr().err


def test_non_numeric_rates_are_refused(config, capsys):
    assert search(config, "--rates", "fast,slow") == 2
    assert "'fast,slow' is not a list of numbers" in capsys.readouterr().err
