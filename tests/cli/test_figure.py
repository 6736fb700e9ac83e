"""`megavis figure` on a run with three checkpoints."""

import csv
import importlib
import io
import json
import shutil
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image
from shard_folder import identity
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written_shards import write_payloads

from megavis.cli import main
from megavis.config.papers import paper_figures
from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.manifest import SourceIdentity
from megavis.tokenizers.palette import Palette

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
    assert record["run"] == "small"
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


def contents(folder):
    """Return the bytes of all files but the list of commands."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "commands.jsonl"]
    return {path: path.read_bytes() for path in files}


def test_figures_in_another_folder(run, tmp_path):
    """The run may be someone else's, on a disk that can only be read."""
    before = contents(run)
    words = ["--device", "cpu", "--out", str(tmp_path / "new")]
    assert main(["figure", "neighbors", str(run), *words, "--no-cache"]) == 0
    networks = ["--untrained-networks", "1"]
    assert main(["figure", "depth", str(run), *words, *networks, "--no-cache"]) == 0
    assert main(["figure", "likelihood", str(run), *words, "--no-cache"]) == 0
    assert main(["figure", "completions", str(run), *words]) == 0
    assert main(["figure", "patches", str(run), *words]) == 0
    assert contents(run) == before
    names = {path.name for path in (tmp_path / "new").iterdir()}
    drawn = {"neighbors.png", "depth.png", "likelihood.png", "completions.png", "patches.png"}
    assert drawn | {"depth.json", "depth.csv"} <= names


@pytest.mark.parametrize("figure", ["completions", "neighbors", "correlation", "patches"])
def test_figures_are_not_of_training_images(run, shard_folders, capsys, figure):
    words = [figure, str(run), "--images", str(shard_folders / "train"), "--device", "cpu"]
    assert main(["figure", *words]) == 2
    assert f"{shard_folders}/train cannot evaluate what was trained on" in capsys.readouterr().err


@pytest.fixture(scope="module")
def many_classes(shard_folders, tmp_path_factory):
    """Shards of another data set of 30 classes, two of which have a single training image."""
    root = tmp_path_factory.mktemp("many")
    palette, codec = Palette.load(shard_folders / "palette.npy"), PaletteCodec(16)
    random = np.random.default_rng(0)
    for part, labels in (
        ("train", [*range(30), *np.arange(70) % 28]),
        ("selection", np.arange(30)),
        ("validation", np.arange(60) % 30),
    ):
        write_payloads(
            root / part,
            [codec.encode(random.integers(0, len(palette), 16).astype(np.uint16)) for _ in labels],
            suffix="tok",
            labels=labels,
            class_names=[f"class {number}" for number in range(30)],
            kind="palette",
            image_size=4,
            num_tokens=16,
            tokenizer=identity("palette", palette.sha256, len(palette)),
            source=SourceIdentity(
                description=part, num_files=len(labels), sha256=sha256(part.encode()).hexdigest()
            ),
        )
        palette.save(root / part / "palette.npy")
    return root


def test_figures_of_another_data_set(run, many_classes, capsys):
    """iGPT, Figures 2 and 3: CIFAR's probe over the layers, and over ImageNet's loss."""
    folders = [f"--{part}={many_classes}/{part}" for part in ("train", "validation")]
    words = [*folders, "--classifier", "plain", "--device", "cpu", "--name"]
    assert main(["figure", "likelihood", str(run), *words, "likelihood_many"]) == 0
    table = run / "evaluation" / "likelihood_many.csv"
    rows = [*csv.DictReader(table.open())]
    assert [row["step"] for row in rows] == ["3", "6", "9"]
    # The loss is still the one that training logged, on the run's own images.
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(rows[-1]["validation_loss"]) == pytest.approx(last["validation_loss"], rel=1e-5)
    assert rows[-1]["loss_images"].endswith("validation")
    assert rows[-1]["loss_images"] != f"{many_classes}/validation"
    assert [rows[-1][key] for key in ("num_train", "num_validation")] == ["100", "60"]
    assert [rows[-1][key] for key in ("classifier", "num_loss_images")] == ["plain", "36"]
    assert float(rows[-1]["penalty"]) == pytest.approx(1 / 100)
    loss = ["--loss-images", f"{many_classes}/validation", "--num-loss-images", "20"]
    assert main(["figure", "likelihood", str(run), *words, "likelihood_many", *loss]) == 0
    assert [*csv.DictReader(table.open())][-1]["num_loss_images"] == "20"

    words += ["depth_many", "--selection", f"{many_classes}/selection"]
    assert main(["figure", "depth", str(run), *words, "--untrained-networks", "1"]) == 0
    assert (run / "evaluation" / "depth_many.png").exists()
    record = json.loads((run / "evaluation" / "depth_many.json").read_text())
    assert (record["num_fitted"], record["num_held_out"], record["num_classes"]) == (100, 30, 30)
    assert (record["classifier"], record["splits"]["train"]) == ("plain", f"{many_classes}/train")


def test_probe_of_many_classes_chooses_on_a_part(run, many_classes, capsys):
    """Classes with a single image are no error (ImageNet's first 5,000 images have some)."""
    folders = [f"--{part}={many_classes}/{part}" for part in ("train", "validation")]
    words = [*folders, "--device", "cpu", "--untrained-networks", "1", "--no-cache"]
    assert main(["probe", str(run), *words, "--train-images", "60"]) == 0
    assert "48 + 12 training images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "../depth"], "'../depth' is not a file name"),
        (["--name", ""], "'' is not a file name"),
        (["--classifier", "sgd"], "choose from"),
    ],
)
def test_wrong_name_and_classifier(run, capsys, words, message):
    assert main(["figure", "depth", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_loss_images_were_not_trained_on(run, shard_folders, capsys):
    words = ["--loss-images", f"{shard_folders}/train", "--device", "cpu"]
    assert main(["figure", "likelihood", str(run), *words]) == 2
    assert f"{shard_folders}/train" in capsys.readouterr().err


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
        module, _, function = spec.plot.partition(":")
        for name in (function, spec.applies):
            assert callable(getattr(importlib.import_module(module), name))
