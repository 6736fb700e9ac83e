"""A grid of runs: what it parses, which runs it makes, what it draws."""

import csv

import pytest
from tiny import tiny

from megavis.cli import main
from megavis.evaluation.feature_cache import cached_features
from megavis.training.search.axis import SweepAxis
from megavis.training.search.sweep import points_of

pytestmark = pytest.mark.once

GRID = ["--grid", "objective.noise_a=0.1,1", "--grid", "objective.noise_b=1..10:2"]


@pytest.fixture(scope="module")
def config(image_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "c.yaml"
    path.write_text(
        tiny(
            "{name: darl, patch_size: 4, loss: diffusion}",
            shards=image_shards,
            validates=True,
            output=str(folder),
            model={"num_layers": 1, "hidden_size": 8},
            training={"steps": 1, "batch_size": 4, "validate_every": 1, "validation_images": 8},
        )
    )
    return path


def test_axes_are_read():
    assert SweepAxis.parse("optimizer.learning_rate=1e-3,1e-4").values == ("1e-3", "1e-4")
    axis = SweepAxis.parse("objective.noise_a=0.1..10:5")
    assert (axis.short, axis.values) == ("noise_a", ("0.1", "0.3162", "1", "3.162", "10"))


@pytest.mark.parametrize("text", ["seed", "=1", "seed=", "a=1..x:3", "a=3..1:3", "a=1..3:1"])
def test_other_words_are_refused(text, config, capsys):
    assert main(["sweep", str(config), "--grid", text]) == 2
    assert "LOW" in capsys.readouterr().err


def test_one_axis_is_no_heat_map(config, capsys):
    assert main(["sweep", str(config), *GRID[:2]]) == 2
    assert "give --grid twice" in capsys.readouterr().err


def test_every_point_is_checked_before_any_is_trained(config, capsys):
    wrong = ["--grid", "objective.noise_b=1,-1"]
    assert main(["sweep", str(config), *GRID[:2], *wrong]) == 2
    assert "objective.noise_b" in capsys.readouterr().err
    assert not list(config.parent.glob("tiny*"))


def test_a_grid_in_two_goes(config, capsys):
    command = ["sweep", str(config), *GRID, "--device", "cpu"]
    assert main([*command, "--count"]) == 0
    assert capsys.readouterr().out == "4\n"
    assert main([*command, "--draw"]) == 2
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
    assert main([*command, "--draw", "--train-images", "100"]) == 0
    with (folder / "sweep.csv").open() as file:
        assert all(0 <= float(row["score"]) <= 1 for row in csv.DictReader(file))
    assert len(cached_features(config.parent / runs[0])) == 2


def test_an_index_beyond_the_grid(config, capsys):
    assert main(["sweep", str(config), *GRID, "--index", "4"]) == 2
    assert "the grid has the runs 0 to 3" in capsys.readouterr().err


def test_names_of_runs():
    from types import SimpleNamespace

    told = []

    def load(words):
        told.append(list(words))
        return SimpleNamespace(config=SimpleNamespace(name="base"))

    points_of([SweepAxis("a.x", ("1", "2")), SweepAxis("b.y", ("3",))], load)
    assert told[1:] == [
        ["a.x=1", "b.y=3", "name=base-x-1-y-3"],
        ["a.x=2", "b.y=3", "name=base-x-2-y-3"],
    ]
