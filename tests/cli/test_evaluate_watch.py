"""Evaluation of checkpoints as they appear, by `megavis evaluate watch` or alongside training."""

import csv
import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from small_network import Small

from megavis.checkpoint.format.folder import step_folder
from megavis.cli import main
from megavis.commands import evaluate, evaluate_watch
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.section import EvaluationConfig
from megavis.evaluation.features import cached_features
from megavis.evaluation.results import WatchedCheckpoint
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch
from megavis.training.callbacks import validation
from megavis.training.metrics import drop_watched, read_json_lines

pytestmark = pytest.mark.once
FEW = ["--train-images", "100", "--validation-images", "40"]


@pytest.fixture(scope="module")
def run_folder(tiny_config):
    words = ["name=watched", "training.validate_every=4", "training.validation_images=40"]
    assert main(["train", str(tiny_config), *words]) == 0
    return tiny_config.parent / "runs" / "watched"


@pytest.fixture
def copied(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "watched")


def measured(folder):
    return read_json_lines(folder / "evaluation" / "watch.jsonl")


def test_checkpoints_are_evaluated_once(run_folder, copied, capsys):
    what = ["--what", "loss,probe,neighbors,samples"]
    assert main(["evaluate", "watch", str(copied), *what, *FEW, "--every", "5"]) == 0
    (last,) = measured(copied)
    assert last["step"] == 12, "the last checkpoint is evaluated regardless of --every"
    logged = {line["step"]: line for line in read_json_lines(run_folder / "metrics.jsonl")}
    assert last["validation_loss"] == pytest.approx(logged[12]["validation_loss"], rel=1e-6)
    assert 0 <= last["neighbors_accuracy"] <= 1
    assert (copied / "samples" / "watch-00000012.png").exists()
    assert list((copied / "tensorboard" / "evaluation").glob("events*"))

    capsys.readouterr()
    assert main(["evaluate", "watch", str(copied), "--what", "loss", *FEW]) == 0
    assert [line["step"] for line in measured(copied)] == [12, 4, 8]
    assert "step 4: validation_loss" in capsys.readouterr().out


def test_what_an_earlier_watch_has_not_measured_is_measured(copied, capsys):
    """Another measure, or other images, at checkpoints that an earlier watch has evaluated."""
    watch = ["evaluate", "watch", str(copied), "--every", "5"]
    assert main([*watch, "--what", "loss", *FEW]) == 0
    assert main([*watch, "--what", "loss,neighbors", *FEW]) == 0
    first, second = measured(copied)
    assert "validation_loss" not in second
    assert 0 <= second["neighbors_accuracy"] <= 1
    fewer = ["--train-images", "100", "--validation-images", "20"]
    assert main([*watch, "--what", "loss", *fewer]) == 0
    *_, third = measured(copied)
    assert third["validation_images"] == 20
    assert third["validation_loss"] != pytest.approx(first["validation_loss"], rel=1e-6)
    assert main([*watch, "--what", "loss,neighbors", *FEW]) == 0
    assert main([*watch, "--what", "loss", *fewer]) == 0
    assert len(measured(copied)) == 3, "nothing is measured twice"


def test_frechet_distance_matches_evaluate_samples(copied, shards, tmp_path, monkeypatch, capsys):
    for command in (evaluate_watch, evaluate):
        monkeypatch.setattr(command, "open_network", lambda *_: Small())
    reference, npz, out = (tmp_path / name for name in ("reference.npz", "drawn.npz", "out.json"))
    words = ["--num-images", "30", "--out", str(reference)]
    assert main(["evaluate", "statistics", str(shards / "validation"), *words]) == 0
    words = ["--num-images", "5", "--seed", "3", "--npz", str(npz)]
    assert main(["sample", str(copied), *words]) == 0
    words = ["--reference", str(reference), "--out", str(out)]
    assert main(["evaluate", "samples", str(npz), *words]) == 0
    capsys.readouterr()
    words = ["--num-samples", "5", "--seed", "3", "--reference", str(reference), "--every", "5"]
    assert main(["evaluate", "watch", str(copied), "--what", "frechet", *words]) == 0
    (line,) = measured(copied)
    words[1] = "6"
    assert main(["evaluate", "watch", str(copied), "--what", "frechet", *words]) == 0
    line, more = measured(copied)
    assert more["distance_of"].startswith("N 6 of")
    assert main(["evaluate", "watch", str(copied), "--what", "frechet", *words]) == 0
    assert len(measured(copied)) == 2
    expected = json.loads(out.read_text())["frechet_distance"]
    assert line["frechet_distance"] == pytest.approx(expected, rel=1e-5)
    settings = f"N 5 of watched at step 12, seed 3, network small abababab, reference {reference}"
    assert line["distance_of"].startswith(settings)
    assert f" | {settings}" in capsys.readouterr().out


def test_probe_matches_the_likelihood_figure(copied):
    for step in (4, 8):
        shutil.rmtree(step_folder(copied, step))
    assert main(["evaluate", "watch", str(copied), "--what", "probe", *FEW]) == 0
    assert len(cached_features(copied)) == 2
    assert main(["figure", "likelihood", str(copied), *FEW, "--no-cache"]) == 0
    with (copied / "evaluation" / "likelihood.csv").open() as file:
        (row,) = csv.DictReader(file)
    (line,) = measured(copied)
    assert float(row["accuracy"]) == pytest.approx(line["probe_accuracy"])
    assert int(row["layer"]) == line["probe_layer"]


def test_pruned_checkpoint_is_skipped(copied, monkeypatch, capsys):
    from megavis.checkpoint.format import tensor_reader

    opened = tensor_reader.CheckpointReader.__init__

    def prune_first(self, folder, *args, **kwargs):
        if folder == step_folder(copied, 4):
            shutil.rmtree(folder)
        opened(self, folder, *args, **kwargs)

    monkeypatch.setattr(tensor_reader.CheckpointReader, "__init__", prune_first)
    assert main(["evaluate", "watch", str(copied), "--what", "loss", *FEW]) == 0
    assert "step 4 was pruned, or rolled back, before it was evaluated" in capsys.readouterr().out
    assert [line["step"] for line in measured(copied)] == [8, 12]


def test_what_a_rollback_has_dropped_is_evaluated_again(copied, monkeypatch):
    """The run takes these steps again, with other images."""
    aside, looks = copied / "aside", []

    def roll_back_and_train_again(_):
        looks.append([line["step"] for line in measured(copied)])
        if len(looks) == 1:
            aside.mkdir()
            for step in (8, 12):
                folder = step_folder(copied, step)
                folder.rename(aside / folder.name)
            (copied / "checkpoints" / "latest").write_text("step-00000004\n")
            drop_watched(copied, 4)
        else:
            for folder in aside.iterdir():
                folder.rename(copied / "checkpoints" / folder.name)
            (copied / "checkpoints" / "latest").write_text("step-00000012\n")
        return len(looks) == 2

    monkeypatch.setattr(evaluate_watch, "_wait", roll_back_and_train_again)
    assert main(["evaluate", "watch", str(copied), "--what", "loss", *FEW]) == 0
    assert looks == [[4, 8, 12], [4]]
    assert [line["step"] for line in measured(copied)] == [4, 8, 12]


def test_what_a_rollback_drops_during_its_evaluation_is_not_kept(copied, monkeypatch):
    pick, latest = evaluate_watch.CheckpointMeasures.numbers, copied / "checkpoints" / "latest"

    def roll_back(self, name):
        if self.opened.step == 12:
            latest.write_text("step-00000008\n")
        return pick(self, name)

    monkeypatch.setattr(evaluate_watch.CheckpointMeasures, "numbers", roll_back)
    monkeypatch.setattr(evaluate_watch, "_wait", lambda _: True)
    assert main(["evaluate", "watch", str(copied), "--what", "loss", *FEW]) == 0
    assert [line["step"] for line in measured(copied)] == [4, 8]


def test_damaged_checkpoint_is_an_error(copied, capsys):
    (step_folder(copied, 4) / "manifest.json").unlink()
    assert main(["evaluate", "watch", str(copied), "--what", "loss", *FEW]) == 2
    assert "manifest.json: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--every", "0"], "argument --every: '0' is not a whole number of 1 or more"),
        (["--validation", "nowhere"], "nowhere"),
        (["--what", "frechet"], "--what frechet needs --reference FILE"),
    ],
)
def test_errors(copied, capsys, words, message):
    assert main(["evaluate", "watch", str(copied), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["loss", "neighbors"])
def test_images_that_were_trained_on_are_refused(copied, shards, capsys, what):
    words = ["--validation", str(shards / "train"), "--what", what]
    assert main(["evaluate", "watch", str(copied), *words]) == 2
    assert f"{shards}/train cannot evaluate what was trained on" in capsys.readouterr().err
    assert not (copied / "evaluation" / "watch.jsonl").exists()


def test_completions_are_of_images_that_were_not_trained_on(copied, shards, capsys):
    words = ["--images", str(shards / "train"), "--num-images", "2", "--device", "cpu"]
    assert main(["figure", "completions", str(copied), *words]) == 2
    assert f"{shards}/train cannot evaluate what was trained on" in capsys.readouterr().err


def test_invalid_run_and_metric(tmp_path, capsys):
    assert main(["evaluate", "watch", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["evaluate", "watch", str(tmp_path), "--what", "beauty"]) == 2
    assert "'beauty' is not one of loss, probe" in capsys.readouterr().err


def test_watch_ends_with_its_stdin(copied, monkeypatch):
    settings = EvaluationConfig(what=("loss",), every=12)
    command = validation.watch_command(copied, settings, seed=5)
    assert "--reference" not in command
    assert "--no-cache" in command
    monkeypatch.setattr(os, "nice", lambda _: 0)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(command[3:]) == 0
    (line,) = measured(copied)
    assert (line["step"], line["seed"]) == (12, 5)


@pytest.fixture
def watched_config(tiny_config, tmp_path):
    path = tmp_path / "watched.yaml"
    path.write_text(f"{tiny_config.read_text()}evaluation: {{what: [loss]}}\n")
    return load_config(path, [f"output={tmp_path}"]).config


@pytest.fixture
def alone():
    """A job of one process."""
    yield open_context(read_launch({}), device="cpu")
    close_context()


CHILDREN = {
    "ends": "import sys; sys.stdin.read(); print('measured')",
    "fails": "import sys; sys.stdin.read(); sys.exit(2)",
    "lasts": "import time; time.sleep(3600)",
}


@pytest.mark.parametrize(
    ("child", "finish_within", "warning"),
    [
        ("ends", 600, ""),
        ("fails", 600, "ended with code 2"),
        ("lasts", 0.5, "not done 0.5 s after the end"),
    ],
)
def test_end_of_training(watched_config, alone, monkeypatch, capsys, child, finish_within, warning):
    settings = watched_config.evaluation.model_copy(update={"finish_within": finish_within})
    config = watched_config.model_copy(update={"evaluation": settings})
    command = [sys.executable, "-S", "-c", CHILDREN[child]]
    monkeypatch.setattr(validation, "watch_command", lambda *_, **__: command)
    with validation.evaluate_during(config, alone):
        pass
    stderr = capsys.readouterr().err
    assert warning in stderr
    assert bool(stderr) == bool(warning)


@pytest.mark.parametrize("is_main", [True, False])
def test_a_watch_that_cannot_start_ends_every_process(watched_config, alone, monkeypatch, is_main):
    """The others would wait for the main one, which has ended."""

    def full(folder, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(Path, "mkdir", full)
    # The main process's error comes to all with the next thing that they ask it for.
    monkeypatch.setattr(type(alone), "is_main", is_main)
    monkeypatch.setattr(type(alone), "on_main", lambda _, compute: compute())
    message = f"{watched_config.folder / 'evaluation'}: No space left on device"
    with pytest.raises(UserError) as error, validation.evaluate_during(watched_config, alone):
        pytest.fail("training began")
    assert str(error.value) == message


def test_training_errors_kill_the_watch(watched_config, alone, monkeypatch):
    monkeypatch.setattr(validation, "watch_command", lambda *_, **__: ["sleep", "60"])
    started = []
    popen = validation.subprocess.Popen
    monkeypatch.setattr(
        validation.subprocess,
        "Popen",
        lambda *a, **k: started.append(popen(*a, **k)) or started[0],
    )

    def fail():
        with validation.evaluate_during(watched_config, alone):
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert started[0].returncode == -9


def test_evaluation_section_needs_images(tiny_config, tmp_path, capsys):
    path = tmp_path / "blind.yaml"
    path.write_text(f"{tiny_config.read_text()}evaluation: {{}}\n")
    assert main(["train", str(path), "data.validation="]) == 2
    assert "`evaluation` needs it" in capsys.readouterr().err
    path.write_text(f"{tiny_config.read_text()}evaluation: {{what: [frechet]}}\n")
    assert main(["train", str(path)]) == 2
    stderr = capsys.readouterr().err
    assert "evaluation.reference: is missing; `frechet` needs it" in stderr
    assert "which needs one network: evaluation.inception or evaluation.network" in stderr


def test_report_shows_watched_metrics(copied):
    from megavis.reports.page import render
    from megavis.reports.run_record import RunRecord

    (copied / "evaluation").mkdir(exist_ok=True)
    settings = {"seconds": 1.5, "train_images": 100, "validation_images": None, "seed": 3}
    settings |= {"frechet_distance": 7.5, "distance_of": "N 5 of watched"}
    for step in (4, 8):
        line = WatchedCheckpoint(step=step, probe_accuracy=step / 20, **settings)
        line.append(copied / "evaluation" / "watch.jsonl")
    page = render([RunRecord.read(copied)])
    assert "Checkpoints during training" in page
    assert "<h4>Accuracy by step</h4>" in page
    assert "<h4>Fréchet distance by step</h4>" in page
    assert page.count("N 5 of watched") == 1
    assert "All validation images, classifiers fitted on at most 100, seed 3." in page
    # A curve joins what was measured alike, whose options the caption names.
    other = WatchedCheckpoint(step=8, probe_accuracy=0.9, **{**settings, "seed": 4})
    other.append(copied / "evaluation" / "watch.jsonl")
    (shown,) = _watch_lines(copied)
    assert (list(shown.x), list(shown.y)) == ([8], [90.0])


def _watch_lines(folder):
    """Return the lines of the report's chart of accuracies."""
    from megavis.evaluation.results import WatchedCheckpoint
    from megavis.reports import results

    records = WatchedCheckpoint.read(folder / "evaluation" / "watch.jsonl")
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "line_chart", lambda title, lines, **_: drawn.append(lines))
        list(results.KNOWN_RESULTS["watch"](None, records))
    return drawn[0]
