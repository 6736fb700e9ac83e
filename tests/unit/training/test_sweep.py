"""Sweeps: grid parsing, run names, chained runs and figures."""

import contextlib
import csv
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny

from megavis.cli import main
from megavis.config.arguments import SweepAxis
from megavis.evaluation.features import cached_features
from megavis.training import trainer
from megavis.training.engine import Engine
from megavis.training.search import sweep
from megavis.training.search.sweep import plot_sweep, points_of

pytestmark = pytest.mark.once

GRID = ["--grid", "objective.noise_a=0.1,1", "--grid", "objective.noise_b=1..10:2"]


@pytest.fixture
def config(image_shards, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        tiny(
            "{name: darl, patch_size: 4, loss: diffusion}",
            shards=image_shards,
            validates=True,
            output=str(tmp_path),
            model={"num_layers": 1, "hidden_size": 8},
            training={"steps": 1, "batch_size": 4, "validate_every": 1, "validation_images": 8},
        )
    )
    return path


def test_axis_parsing():
    assert SweepAxis.parse("optimizer.learning_rate=1e-3,1e-4").values == ("1e-3", "1e-4")
    # Neither whole numbers nor names of runs have an exponent such as 1e+04.
    assert SweepAxis.parse("training.steps=5000..20000:3").values == ("5000", "10000", "20000")
    axis = SweepAxis.parse("objective.noise_a=0.1..10:5")
    assert (axis.short, axis.values) == ("noise_a", ("0.1", "0.3162", "1", "3.162", "10"))


@pytest.mark.parametrize("text", ["seed", "=1", "seed=", "a=1..x:3", "a=3..1:3", "a=1..3:1"])
def test_invalid_axes_are_refused(text, config, capsys):
    assert main(["sweep", str(config), "--grid", text]) == 2
    assert "LOW" in capsys.readouterr().err


def test_duplicate_axes_are_refused(config, capsys):
    assert main(["sweep", str(config), *GRID[:2], *GRID[:2]]) == 2
    assert "--grid gives objective.noise_a twice" in capsys.readouterr().err


def test_all_points_are_checked_before_training(config, capsys):
    wrong = ["--grid", "objective.noise_b=1,-1"]
    assert main(["sweep", str(config), *GRID[:2], *wrong]) == 2
    assert "objective.noise_b" in capsys.readouterr().err
    assert not list(config.parent.glob("tiny*"))


def test_sweep_resumes_finished_points(config, capsys):
    command = ["sweep", str(config), *GRID, "--device", "cpu"]
    assert main([*command, "--count"]) == 0
    assert capsys.readouterr().out == "4\n"
    assert main([*command, "--plot"]) == 2
    assert "no run of the grid is finished" in capsys.readouterr().err
    assert main([*command, "--index", "1"]) == 0
    runs = [path.name for path in config.parent.glob("tiny-*")]
    assert runs == ["tiny-noise_a-0.1-noise_b-10"]
    first = (config.parent / runs[0] / "metrics.jsonl").stat().st_mtime_ns
    assert main([*command, "--measure", "loss"]) == 0
    assert (config.parent / runs[0] / "metrics.jsonl").stat().st_mtime_ns == first, "trained again"
    folder = config.parent / "tiny-sweep"
    assert (folder / "sweep.png").exists()
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    pairs = [(row["objective.noise_a"], row["objective.noise_b"]) for row in rows]
    assert pairs == [("0.1", "1"), ("0.1", "10"), ("1", "1"), ("1", "10")]
    assert all(float(row["score"]) > 0 for row in rows)
    assert main([*command, "--plot", "--train-images", "100"]) == 0
    with (folder / "sweep.csv").open() as file:
        assert all(0 <= float(row["score"]) <= 1 for row in csv.DictReader(file))
    assert len(cached_features(config.parent / runs[0])) == 2
    # Results of another seed must not count as this one's.
    capsys.readouterr()
    assert main(["sweep", str(config), "seed=1", *GRID, "--device", "cpu"]) == 2
    assert "this run was started with seed 0" in capsys.readouterr().err
    # Results of other settings must not count either, in training or with --plot.
    for words in ([], ["--plot"]):
        other = ["optimizer.weight_decay=0.1", "--measure", "loss"]
        assert main([*command, *other, *words]) == 2
        message = capsys.readouterr().err
        assert "this run was trained with optimizer.weight_decay 0.0, not 0.1" in message


def test_diverging_point_is_given_up_and_the_others_are_trained(config, monkeypatch, capsys):
    step = Engine.train_step

    def diverge(engine, batches, number):
        real = engine.objective.loss
        if engine.config.optimizer.learning_rate > 1:
            engine.deepspeed.module.loss = lambda *words: real(*words) * math.nan
        return step(engine, batches, number)

    monkeypatch.setattr(Engine, "train_step", diverge)
    command = ["sweep", str(config), "--grid", "optimizer.learning_rate=2,1e-3", "--device", "cpu"]
    command += ["--measure", "loss", "training.steps=8", "training.max_bad_steps=3"]
    for _ in range(2):  # the second sweep has nothing to train
        assert main(command) == 0
        assert "given up: too many bad steps in a row" in capsys.readouterr().out
        with (config.parent / "tiny-sweep" / "sweep.csv").open() as file:
            first, second = csv.DictReader(file)
        assert first["score"] == ""
        assert float(second["score"]) > 0
    run = config.parent / "tiny-learning_rate-2"
    assert json.loads((run / "given_up.json").read_text())["step"] == 3


def test_runs_of_a_sweep_are_evaluated_like_others(config, monkeypatch):
    evaluated = []

    @contextlib.contextmanager
    def evaluate_during(config, context):
        yield
        evaluated.append((config.name, config.evaluation.what))

    monkeypatch.setattr(trainer, "evaluate_during", evaluate_during)
    words = ["--grid", "seed=3", "--measure", "loss", "evaluation={what: [loss]}"]
    assert main(["sweep", str(config), "--device", "cpu", *words]) == 0
    assert evaluated == [("tiny-seed-3", ("loss",))]


@pytest.mark.parametrize("measure", ["loss", "accuracy"])
def test_a_score_that_training_does_not_measure_is_refused_before(config, capsys, measure):
    """Not after hours of training, and as if the runs were not finished."""
    words = [*GRID, "--measure", measure, "training.validate_every=0"]
    assert main(["sweep", str(config), *words]) == 2
    message = f"--measure {measure} needs validation during training"
    assert message in capsys.readouterr().err
    assert not list(config.parent.glob("tiny*"))


def test_a_score_that_a_paper_does_not_measure_is_named(config, capsys):
    command = ["sweep", str(config), "--grid", "seed=3", "--device", "cpu"]
    assert main([*command, "--measure", "accuracy"]) == 2
    assert "the finished runs of the grid have no validation accuracy" in capsys.readouterr().err
    assert main([*command, "--measure", "loss", "--plot"]) == 0


def test_index_out_of_range_is_refused(config, capsys):
    assert main(["sweep", str(config), *GRID, "--index", "4"]) == 2
    assert "the grid has runs 0 to 3" in capsys.readouterr().err


def loading(name, asked):
    """Return a stub of the config loader that records its overrides in `asked`."""

    def load(words):
        asked.append(list(words))
        named = [word.removeprefix("name=") for word in words if word.startswith("name=")]
        return SimpleNamespace(
            config=SimpleNamespace(name=name, folder=f"runs/{(*named, name)[0]}")
        )

    return load


def test_run_names():
    asked = []
    points_of([SweepAxis("a.x", ("1", "2")), SweepAxis("b.y", ("3",))], [loading("base", asked)])
    assert asked[1:] == [
        ["a.x=1", "b.y=3", "name=base-x-1-y-3"],
        ["a.x=2", "b.y=3", "name=base-x-2-y-3"],
    ]


def test_chained_runs_start_from_the_previous_run(monkeypatch):
    """DARL, figure 3: pre-train and fine-tune with each point's architecture."""
    monkeypatch.setattr(sweep, "source_differences", lambda *_: iter(()))
    asked = [], []
    axes = [SweepAxis("objective.a", ("1",)), SweepAxis("optimizer.learning_rate", ("2", "3"))]
    loads = [loading(name, words) for name, words in zip(("base", "fine"), asked, strict=True)]
    points = points_of(axes, loads)
    assert asked[0][1:] == [
        ["objective.a=1", f"optimizer.learning_rate={rate}", f"name=base-a-1-learning_rate-{rate}"]
        for rate in (2, 3)
    ]
    assert asked[1][1:] == [
        [
            "objective.a=1",
            f"finetune.from_run=runs/base-a-1-learning_rate-{rate}",
            f"name=fine-a-1-learning_rate-{rate}",
        ]
        for rate in (2, 3)
    ]
    assert [str(point.folder) for point in points] == [
        f"runs/fine-a-1-learning_rate-{rate}" for rate in (2, 3)
    ]


@pytest.mark.parametrize(
    ("sizes", "panels"), [((3,), 1), ((2, 3), 1), ((2, 2, 3), 2), ((3, 1, 2, 2), 3)]
)
def test_one_heat_map_per_value_of_the_leading_axes(sizes, panels):
    axes = [
        SweepAxis(f"s.k{place}", tuple(map(str, range(size)))) for place, size in enumerate(sizes)
    ]
    scores = np.arange(math.prod(sizes)) / 10
    scores[0] = math.nan
    figure = plot_sweep(axes, scores.tolist(), name="n", what="w")
    pictures = [axis.images[0].get_array() for axis in figure.axes if axis.images]
    assert len(pictures) == panels
    # The last axis runs upwards, the one before it to the right.
    table = scores.reshape(panels, -1, sizes[-1])
    for panel, picture in zip(table, pictures, strict=True):
        for right, column in enumerate(panel):
            for up, score in enumerate(column):
                shown = picture[up, right]
                assert math.isnan(score) == bool(np.ma.is_masked(shown) or np.isnan(shown))
                assert math.isnan(score) or shown == score


@pytest.fixture
def tuned(config):
    path = config.parent / "second.yaml"
    path.write_text(
        f"based_on: {config.name}\nname: second\nfinetune: {{num_classes: 10, from_run: nowhere}}\n"
    )
    return path


def test_sweep_of_chained_runs(config, tuned, capsys):
    """Both runs of a point are trained; the score is the second run's accuracy."""
    command = ["sweep", str(config), "--grid", "objective.noise_a=0.5", "--device", "cpu"]
    assert main([*command, "--then", str(tuned)]) == 0
    first, fine = (config.parent / f"{name}-noise_a-0.5" for name in ("tiny", "second"))
    assert f"from_run: {first}" in (fine / "config.yaml").read_text()
    with (config.parent / "second-sweep/sweep.csv").open() as file:
        (row,) = csv.DictReader(file)
    report = json.loads((fine / "evaluation/finetune_test.json").read_text())
    assert row["run"] == str(fine)
    assert report["step"] == 1
    accuracies = [json.loads(line) for line in (fine / "metrics.jsonl").read_text().splitlines()]
    logged = [each["validation_accuracy"] for each in accuracies if "validation_accuracy" in each]
    assert float(row["score"]) == pytest.approx(logged[-1], abs=1e-6)
    # A signal came during the last validation, after which the second run was saved.
    metrics = [{k: v for k, v in each.items() if "validation" not in k} for each in accuracies[-1:]]
    lines = [json.dumps(each) + "\n" for each in [*accuracies[:-1], *metrics]]
    (fine / "metrics.jsonl").write_text("".join(lines))
    for path in (fine / "evaluation").iterdir():
        path.unlink()
    assert main([*command, "--then", str(tuned), "--plot"]) == 2
    assert "no run of the grid is finished" in capsys.readouterr().err
    assert main([*command, "--then", str(tuned)]) == 0
    with (config.parent / "second-sweep/sweep.csv").open() as file:
        assert next(csv.DictReader(file)) == row
    # A longer run is not finished, although it has the results of the shorter one.
    tuned.write_text(f"{tuned.read_text()}training: {{steps: 2}}\n")
    capsys.readouterr()
    assert main([*command, "--then", str(tuned), "--plot"]) == 2
    assert "no run of the grid is finished yet" in capsys.readouterr().err


def test_overrides_of_the_architecture_reach_the_chained_configs(config, tuned):
    """Otherwise fine-tuning stops after the first pre-training, since the decoders differ."""
    command = ["sweep", str(config), "objective.decoder=mlp", "optimizer.learning_rate=0.5"]
    command += ["--grid", "objective.noise_a=0.5", "--then", str(tuned), "--device", "cpu"]
    assert main([*command, "--measure", "test"]) == 0
    run = config.parent / "second-noise_a-0.5"
    assert "decoder: mlp" in (run / "config.yaml").read_text()
    assert "learning_rate: 0.5" not in (run / "config.yaml").read_text()
    report = json.loads((run / "evaluation/finetune_test.json").read_text())
    with (config.parent / "second-sweep/sweep.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["score"]) == pytest.approx(report["top1"], abs=1e-6)


def test_a_chain_that_does_not_fit_is_refused_before_training(config, tuned, capsys):
    tuned.write_text(f"{tuned.read_text()}model: {{hidden_size: 16}}\n")
    command = ["sweep", str(config), "--grid", "objective.noise_a=0.5", "--then", str(tuned)]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "second-noise_a-0.5 cannot start from tiny-noise_a-0.5, which would be" in message
    assert "model.hidden_size 8, and this config has 16; fine-tuning keeps" in message
    assert not list(config.parent.glob("tiny*"))


def test_test_images_are_of_fine_tuning(config, capsys):
    assert main(["sweep", str(config), *GRID, "--measure", "test"]) == 2
    assert "--measure test needs a last config that fine-tunes" in capsys.readouterr().err
