"""`megavis figure` on a run with three checkpoints."""

import csv
import importlib
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megavis.cli import main
from megavis.config.papers import paper_figures

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def run(train_small, tmp_path_factory):
    """A run of 9 steps with three checkpoints."""
    words = ["model.num_layers=2", "training.steps=9", "training.validate_every=9"]
    words += ["checkpoint.every=3", "checkpoint.keep_last=9"]
    return train_small(tmp_path_factory.mktemp("figures"), *words)


def test_depth_and_likelihood_figures(run, capsys):
    words = ["--device", "cpu", "--untrained-networks", "1"]
    assert main(["figure", "depth", str(run), *words]) == 0
    assert main(["figure", "likelihood", str(run), "--device", "cpu"]) == 0
    assert "small step 6: validation loss" in capsys.readouterr().out
    for name in ("depth", "likelihood"):
        pixels = np.asarray(Image.open(run / "evaluation" / f"{name}.png").convert("RGB"))
        assert pixels.shape[0] > 500
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    with open(run / "evaluation" / "depth.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "1", "2"]
    record = json.loads((run / "evaluation" / "depth.json").read_text())
    assert (record["num_fitted"], record["num_held_out"], record["num_validation"]) == (96, 24, 36)
    assert record["splits"]["validation"].endswith("validation")
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    [shown] = events.Images("evaluation/depth")
    drawn = np.asarray(Image.open(run / "evaluation" / "depth.png").convert("RGB"))
    assert shown.step == 9
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown.encoded_image_string))), drawn)
    with open(run / "evaluation" / "likelihood.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["3", "6", "9"]
    # The validation loss that training logged at its last step.
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(rows[-1]["validation_loss"]) == pytest.approx(last["validation_loss"], rel=1e-5)


def test_likelihood_figure_needs_checkpoints(run, tmp_path, capsys):
    shutil.copy(run / "config.yaml", tmp_path)
    assert main(["figure", "likelihood", str(tmp_path)]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_inapplicable_figure_lists_the_applicable_ones(run, capsys):
    assert main(["figure", "jigsaw", str(run), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "error: jigsaw: igpt does not predict the positions of patches; figures of this run are:"
        " depth, likelihood, completions, neighbors, correlation, patches\n"
    )


def test_declared_figures_resolve():
    declared = {spec.name: spec for spec in paper_figures()}
    names = {"patches", "reconstructions", "groups", "positions", "jigsaw", "mixture"}
    names |= {"posterior", "deviations"}
    assert set(declared) == names
    for spec in declared.values():
        module, _, function = spec.draw.partition(":")
        for name in (function, spec.applies):
            assert callable(getattr(importlib.import_module(module), name))
