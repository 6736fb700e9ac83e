"""Fine-tuning a run to find objects, and `megavis evaluate detection`."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from coco_folder import write_coco_shards

import megavis
from data_tools.__main__ import main as data_tools
from megavis.cli import main
from megavis.evaluation.detection import detect
from megavis.parallel.context import close_context
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
training: {{steps: 1, batch_size: 4}}
"""
INSTANCES = """\
based_on: mae.yaml
name: instances
data: {{train: {folder}/train, validation: {folder}/validation, image_size: 64, flip: true,
  crop: jittered, jitter: [0.5, 1.5]}}
model: {{position_scale: 0.5}}
parallel: {{zero_stage: 1}}
optimizer: {{ema_decay: 0.9}}
training: {{steps: 4, batch_size: 2, validate_every: 2, log_every: 1, precision: bf16}}
checkpoint: {{every: 2}}
finetune: {{task: instances, num_classes: 3, from_run: {folder}/runs/mae, head_width: 8,
  layer_decay: 0.8, drop_path: 0.1, detector: cascade, window: 4, global_blocks: [2],
  relative_positions: true}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_coco_shards(tmp_path_factory.mktemp("instances"), train=6, validation=4)
    images = str(folder / "coco" / "train2017")
    assert data_tools(["jpeg", images, "--out", str(folder / "pictures")]) == 0
    for name, text in {"mae": PRETRAINED, "instances": INSTANCES}.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    assert main(["train", str(folder / "mae.yaml"), "--device", "cpu"]) == 0
    assert main(["finetune", str(folder / "instances.yaml"), "--device", "cpu"]) == 0
    return folder


def result(folder, name):
    return json.loads((folder / "runs/instances/evaluation" / f"{name}.json").read_text())


def test_best_step_is_evaluated_on_both_halves(folder):
    selection, test = result(folder, "finetune_selection"), result(folder, "finetune_test")
    assert (selection["num_images"], test["num_images"]) == (2, 2)
    assert test["class_names"] == ["person", "car", "cup"]
    assert set(test["box"]) == set(test["mask"])
    assert len(test["box"]["by_class"]) == 3
    assert (folder / "runs/instances/evaluation/finetune_test.png").stat().st_size > 10_000
    losses = [line["loss"] for line in read_metrics(folder / "runs/instances") if "loss" in line]
    assert losses[-1] < losses[0]


def test_resumed_run_repeats_every_bit(folder):
    run, whole = folder / "runs/instances", read_metrics(folder / "runs/instances")
    weights = (run / "checkpoints/step-00000004/manifest.json").read_bytes()
    shutil.rmtree(run / "checkpoints/step-00000004")
    (run / "checkpoints/latest").write_text("step-00000002\n")
    assert main(["finetune", str(folder / "instances.yaml"), "--device", "cpu"]) == 0
    again = read_metrics(run)
    names = ("loss", "validation_loss", "validation_accuracy")
    for one, other in zip(whole, again, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    kept = [json.loads(each)["files"] for each in (
        weights, (run / "checkpoints/step-00000004/manifest.json").read_bytes()
    )]  # fmt: skip
    assert kept[0] == kept[1]


def test_whole_images_are_evaluated(folder, capsys):
    words = [str(folder / "runs/instances"), "--device", "cpu", "--batch-size", "3"]
    assert main(["evaluate", "detection", *words]) == 0
    found = result(folder, "detection")
    assert found["num_images"] == 4
    assert "box: ap " in (out := capsys.readouterr().out)
    assert out.count("ar large") == 2
    assert (folder / "runs/instances/evaluation/detection.png").exists()


def found_by(folder):
    """Return the boxes, scores, classes and masks that a run or an export finds in an image."""
    opened = megavis.load(folder, device="cpu")
    try:
        image = np.random.default_rng(0).integers(0, 256, (48, 40, 3), np.uint8)
        [found] = detect(opened.inference, opened.objective, [image])
        return found
    finally:
        close_context()


def test_export_finds_the_same_objects(folder, tmp_path, capsys):
    run, out = str(folder / "runs/instances"), tmp_path / "exported"
    assert main(["export", run, "--to", "timm", str(out)]) == 2
    assert "--to timm: a ViT gives features or classes, and this run finds instances" in (
        capsys.readouterr().err
    )
    assert not out.exists()
    assert main(["export", run, "--to", "huggingface", str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "pipeline_tag: object-detection" in card
    assert "Only `megavis.load` opens it: its head finds instances" in card
    mine, theirs = found_by(run), found_by(out)
    assert len(mine.scores) > 0
    for one, other in zip(dataclasses.astuple(mine), dataclasses.astuple(theirs), strict=True):
        assert np.array_equal(one, other)


def test_what_does_not_fit_is_refused(folder, capsys):
    runs = folder / "runs"
    assert main(["evaluate", "detection", str(runs / "mae"), "--device", "cpu"]) == 2
    assert "was not fine-tuned with finetune.task: instances" in capsys.readouterr().err
    words = ["finetune", str(folder / "instances.yaml"), "--device", "cpu", "name=other"]
    for change, message in (
        (f"data.train={folder}/pictures", "holds jpeg; finetune.task instances needs images with"),
        ("finetune.num_classes=4", "has 3 classes; finetune.num_classes is 4"),
        ("data.rand_augment=[9,0.5]", "remove data.rand_augment"),
    ):
        assert main([*words, change]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["probe"], ["figure", "depth"], ["figure", "attention"], ["figure", "correlation"]]
)
def test_it_has_no_features_of_images(folder, words, capsys):
    assert main([*words, str(folder / "runs/instances"), "--device", "cpu"]) == 2
    assert "finetune.task instances has no features of whole images; take the run that it" in (
        capsys.readouterr().err
    )


def test_its_classes_have_no_ensemble(folder, capsys):
    assert main(["ensemble", str(folder / "runs/instances"), "--device", "cpu"]) == 2
    assert "was not fine-tuned with finetune.task: classes" in capsys.readouterr().err
