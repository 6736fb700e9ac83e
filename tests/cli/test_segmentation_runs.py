"""Fine-tuning a run for segmentation, and `megavis evaluate segmentation`."""

import json
import shutil

import pytest
from scene_shards import write_scene_shards
from shard_folder import with_classes

from data_tools.__main__ import main as data_tools
from megavis.cli import main
from megavis.training.metrics import read_metrics

pytestmark = pytest.mark.once

PRETRAINED = """\
name: mae
output: {folder}/runs
objective: {{name: mae, patch_size: 8}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm,
  activation: gelu, add_bias: true}}
data: {{train: {folder}/pictures, image_size: 32, crop: random_resized}}
optimizer: {{learning_rate: 1e-3}}
training: {{steps: 2, batch_size: 6}}
"""
SEGMENTS = """\
based_on: mae.yaml
name: segments
data: {{train: {folder}/panoptic/train, validation: {folder}/panoptic/validation, flip: true}}
training: {{steps: 6, batch_size: 6, validate_every: 3, log_every: 1}}
checkpoint: {{every: 3}}
finetune: {{task: segments, num_classes: 5, from_run: {folder}/runs/mae, head_width: 8,
  layer_decay: 0.8}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_scene_shards(tmp_path_factory.mktemp("segments"), size=48)
    images = str(folder / "scenes" / "images" / "train")
    assert data_tools(["jpeg", images, "--out", str(folder / "pictures")]) == 0
    for name, text in {"mae": PRETRAINED, "segments": SEGMENTS}.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    assert main(["train", str(folder / "mae.yaml"), "--device", "cpu"]) == 0
    assert main(["finetune", str(folder / "segments.yaml"), "--device", "cpu"]) == 0
    return folder


def result(folder, name):
    return json.loads((folder / "runs/segments/evaluation" / f"{name}.json").read_text())


def test_best_step_is_evaluated_on_both_halves(folder):
    selection, test = result(folder, "finetune_selection"), result(folder, "finetune_test")
    assert (selection["num_images"], test["num_images"]) == (3, 3)
    assert test["class_names"] == ["ball", "box", "cone", "wall", "floor"]
    assert len(test["iou"]) == 5
    assert sum(map(sum, test["confusion"])) == 3 * 32 * 32
    metrics = read_metrics(folder / "runs/segments")
    losses = [record["loss"] for record in metrics if "loss" in record]
    assert losses[-1] < losses[0]


def test_resumed_run_repeats_every_bit(folder, capsys):
    run, whole = folder / "runs/segments", read_metrics(folder / "runs/segments")
    shutil.copytree(run, folder / "kept")
    shutil.rmtree(run / "checkpoints/step-00000006")
    (run / "checkpoints/latest").write_text("step-00000003\n")
    assert main(["finetune", str(folder / "segments.yaml"), "--device", "cpu"]) == 0
    again = read_metrics(run)
    pairs = zip(whole, again, strict=True)
    assert all(one.get("loss") == other.get("loss") for one, other in pairs)
    assert (
        result(folder, "finetune_test")["confusion"]
        == json.loads((folder / "kept/evaluation/finetune_test.json").read_text())["confusion"]
    )


def test_whole_images_are_evaluated_in_their_own_size(folder, capsys):
    words = [str(folder / "runs/segments"), "--device", "cpu", "--stride", "20"]
    assert main(["evaluate", "segmentation", *words]) == 0
    found = result(folder, "segmentation")
    assert (found["num_images"], found["stride"]) == (6, 20)
    assert sum(map(sum, found["confusion"])) == 6 * 48 * 48
    assert f"mIoU {found['mean_iou']:.1%}" in capsys.readouterr().out


def test_what_does_not_fit_is_refused(folder, capsys):
    runs = folder / "runs"
    assert main(["evaluate", "segmentation", str(runs / "mae"), "--device", "cpu"]) == 2
    assert "was not fine-tuned with finetune.task: segments" in capsys.readouterr().err
    words = [str(runs / "segments"), "--stride", "33", "--device", "cpu"]
    assert main(["evaluate", "segmentation", *words]) == 2
    assert "--stride 33: must be at most 32" in capsys.readouterr().err
    names = ["box", "ball", "cone", "wall", "floor"]
    other = with_classes(folder / "panoptic" / "validation", folder / "other", names)
    words = [str(runs / "segments"), "--images", str(other), "--device", "cpu"]
    assert main(["evaluate", "segmentation", *words]) == 2
    wanted = "other numbers its classes differently from the run's training set"
    assert wanted in capsys.readouterr().err
    words = ["finetune", str(folder / "segments.yaml"), "--device", "cpu", "name=other"]
    assert main([*words, f"data.train={folder}/depth/train"]) == 2
    assert "holds depth maps; finetune.task segments needs pairs" in capsys.readouterr().err
    assert main([*words, "finetune.num_classes=6"]) == 2
    assert "has 5 classes; finetune.num_classes is 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["probe"], ["figure", "depth"], ["figure", "attention"], ["figure", "correlation"]]
)
def test_it_has_no_features_of_images(folder, words, capsys):
    assert main([*words, str(folder / "runs/segments"), "--device", "cpu"]) == 2
    assert "finetune.task segments has no features of whole images; take the run that it" in (
        capsys.readouterr().err
    )


def test_its_classes_have_no_ensemble(folder, capsys):
    assert main(["ensemble", str(folder / "runs/segments"), "--device", "cpu"]) == 2
    assert "was not fine-tuned with finetune.task: classes" in capsys.readouterr().err
