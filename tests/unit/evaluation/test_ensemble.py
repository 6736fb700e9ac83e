"""Ensembles of runs: mean probabilities against NumPy, and the command."""

import json

import numpy as np
import pytest
import torch
import yaml
from image_shards import write_image_shards
from PIL import Image
from tiny import VIT, tiny

from megavis.cli import main
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.classes import ClassProbabilities, average

pytestmark = pytest.mark.once


def test_ensemble_averages_probabilities():
    random = np.random.default_rng(0)
    labels = torch.from_numpy(random.integers(7, size=40))
    members = [
        ClassProbabilities(torch.from_numpy(random.dirichlet(np.full(7, 0.3), size=40)), labels)
        for _ in range(3)
    ]
    both = average(members)
    mean = np.mean([member.probabilities.numpy() for member in members], axis=0)
    np.testing.assert_allclose(both.probabilities.numpy(), mean)
    order = mean.argsort(1)[:, ::-1]
    for count in (1, 5):
        hits = [label in row[:count] for label, row in zip(labels.tolist(), order, strict=True)]
        assert both.top_k_accuracy(count) == pytest.approx(np.mean(hits))
    with pytest.raises(ValueError, match="different images"):
        average([members[0], ClassProbabilities(members[1].probabilities, labels.flip(0))])


def test_ensemble_command_reports_each_run_and_the_ensemble(small_config, tmp_path, capsys):
    tuning = ["finetune", str(small_config), "--device", "cpu", f"output={tmp_path}"]
    tuning += ["training.steps=4", "training.validate_every=2", "finetune={num_classes: 3}"]
    for words in (["name=first"], ["name=second", "seed=1", "data.images_per_class=2"]):
        assert main([*tuning, *words]) == 0
    runs = [str(tmp_path / name) for name in ("first", "second")]
    capsys.readouterr()
    assert main(["ensemble", *runs, "--device", "cpu", "--json", str(tmp_path / "e.json")]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())
    assert [row["run"] for row in result["rows"]] == [*runs, "together"]
    assert result["num_images"] == 18
    for name, row in zip(runs, result["rows"], strict=False):
        alone = json.loads((tmp_path / name / "evaluation" / "finetune_test.json").read_text())
        assert row["top1"] == pytest.approx(alone["top1"])
        assert f"top-1 {row['top1']:.1%}" in printed
        assert (alone["num_train"] == 6) == (name == runs[1])
    (tmp_path / "second" / "evaluation" / "finetune_test.json").unlink()
    assert main(["ensemble", runs[0], "--device", "cpu", "--json", str(tmp_path / "e.json")]) == 0
    (row,) = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert row == result["rows"][0]
    assert main(["ensemble", *runs, "--device", "cpu"]) == 2
    assert "is not a finished fine-tuning run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mp3_and_mae(shards, image_shards, tmp_path_factory):
    """Fine-tuned runs of both papers, tested on all of `finetune.test`."""
    folder = tmp_path_factory.mktemp("ensemble")
    write_image_shards(shards / "crops" / "selection", folder / "selection")
    for name in ("mp3", "mae"):
        text = tiny(
            f"{{name: {name}, patch_size: 4, mask_ratio: 0.5}}", shards=image_shards, model=VIT
        )
        path = folder / f"{name}.yaml"
        path.write_text(f"{text}output: {folder}\n")
        words = [f"data.validation={folder}/selection", "training.validate_every=3"]
        words += [f"finetune={{num_classes: 10, test: {image_shards}/validation}}"]
        assert main(["finetune", str(path), f"name={name}", "--device", "cpu", *words]) == 0
    return folder


def test_ensemble_of_mp3_and_mae(mp3_and_mae, image_shards, capsys):
    """MP3, section 4.2.3: "averaging the outputs of an MP3 and MAE finetuned model"."""
    runs, out = [str(mp3_and_mae / name) for name in ("mp3", "mae")], mp3_and_mae / "e.json"
    assert main(["ensemble", *runs, "--device", "cpu", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [row["run"] for row in result["rows"]] == [*runs, "together"]
    assert result["num_images"] == len(ShardDataset(image_shards / "validation"))


def test_runs_tested_on_a_half_and_on_all_images_are_not_averaged(mp3_and_mae, capsys):
    """One run has `finetune.test`; the other holds out half of the same shards."""
    config = mp3_and_mae / "mae.yaml"
    words = ["name=half", "training.validate_every=3", "finetune={num_classes: 10}"]
    tested = mp3_and_mae / "mp3" / "config.yaml"
    folder = yaml.safe_load(tested.read_text())["finetune"]["test"]
    words += [f"data.validation={folder}", "--device", "cpu"]
    assert main(["finetune", str(config), *words]) == 0
    runs = [str(mp3_and_mae / name) for name in ("mp3", "half")]
    assert main(["ensemble", *runs, "--device", "cpu"]) == 2
    assert "evaluated on different images; name one folder with --images" in capsys.readouterr().err
    assert main(["ensemble", *runs, "--device", "cpu", "--images", folder]) == 0


def test_images_that_a_run_was_trained_on_are_refused(mp3_and_mae, image_shards, capsys):
    words = [str(mp3_and_mae / "mp3"), "--images", str(image_shards / "train"), "--device", "cpu"]
    assert main(["ensemble", *words]) == 2
    assert "cannot evaluate what was trained on" in capsys.readouterr().err


def test_images_of_another_size_are_refused_without_keys_of_the_config(
    mp3_and_mae, shards, tmp_path, capsys
):
    path = tmp_path / "crops" / "0" / "0.png"
    path.parent.mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(path)
    other = write_image_shards(tmp_path / "crops", tmp_path / "other")
    words = [str(mp3_and_mae / "mp3"), "--images", str(other), "--device", "cpu"]
    assert main(["ensemble", *words]) == 2
    error = capsys.readouterr().err
    assert "holds images of 20x20 pixels" in error
    assert "this run reads images stored at 16x16 pixels" in error
    assert "data.crop" not in error
