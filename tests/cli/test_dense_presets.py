"""The presets for COCO and ADE20K, by the commands of their headers, on folders as published."""

import json
import shlex

import numpy as np
import pytest
from children import open_child
from coco_folder import write_coco
from PIL import Image
from preset_headers import ROOT, commands_of

from data_tools.__main__ import main as data_tools
from megavis.cli import main
from megavis.config.load import load_config

pytestmark = pytest.mark.once

PRESETS = sorted(
    path for kind in ("coco", "ade20k") for path in ROOT.glob(f"yaml_configs/*/vit_*_{kind}.yaml")
)
# Narrow, on small images, and from scratch: one step of all blocks.
SMALL = (
    "finetune.from_run=null",
    "finetune.layer_decay=1.0",
    "finetune.head_width=8",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_attention_heads=2",
    "training.steps=1",
    "training.batch_size=2",
    "training.micro_batch_size=1",
    "training.validate_every=1",
    "training.precision=float32",
    "schedule.warmup_steps=0",
    "checkpoint.every=1",
)
# COCO's 80 classes are numbered from 1 to 90.
SKIPPED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}


def write_published(folder):
    """Write both data sets with all their classes and few images."""
    write_coco(folder, train=4, validation=2)
    for path in (folder / "annotations").iterdir():
        tree = json.loads(path.read_text())
        known = {each["id"]: each for each in tree["categories"]}
        tree["categories"] = [
            known.get(number, {"supercategory": "other", "id": number, "name": f"class {number}"})
            for number in range(1, 91)
            if number not in SKIPPED
        ]
        path.write_text(json.dumps(tree))
    scenes, random = folder / "ADEChallengeData2016", np.random.default_rng(0)
    for part, count in (("training", 4), ("validation", 2)):
        for kind in ("images", "annotations"):
            (scenes / kind / part).mkdir(parents=True)
        for number in range(count):
            name = f"ADE_{part[:5]}_{number:08d}"
            pixels = random.integers(0, 256, (150, 180, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(scenes / "images" / part / f"{name}.jpg")
            # 0 is none of the classes.
            classes = random.integers(0, 151, (10, 12)).astype(np.uint8).repeat(15, 0).repeat(15, 1)
            Image.fromarray(classes).save(scenes / "annotations" / part / f"{name}.png")
    rows = [f"{number}\t0.1\t1\t1\t0\tclass {number}" for number in range(1, 151)]
    listed = "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows])
    (scenes / "objectInfo150.txt").write_text(f"{listed}\n")


@pytest.fixture(scope="module")
def in_folder(tmp_path_factory):
    """A process in a folder with the shards that the headers' commands write."""
    folder = tmp_path_factory.mktemp("dense")
    write_published(folder)
    lines = [command.text for path in PRESETS for command in commands_of(path)]
    written = dict.fromkeys(
        line.replace("$part", part)
        for line in lines
        for part in ("training", "validation")
        if "data_tools" in line
    )
    assert len(written) == 4
    with open_child(folder) as run:
        for line in written:
            assert run(data_tools, shlex.split(line)[3:]) == 0
        yield run


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_trains_and_is_evaluated(in_folder, path):
    config = load_config(path).config
    kind, *sizes = {
        "instances": ("detection", "data.image_size=256", "finetune.window=8"),
        "segments": ("segmentation", "data.image_size=128"),
    }[config.finetune.task]
    assert in_folder(main, ["finetune", str(path), *SMALL, *sizes, "--device", "cpu"]) == 0
    assert in_folder(main, ["evaluate", kind, str(config.folder), "--device", "cpu"]) == 0
    result = in_folder(read_result, str(config.folder), kind)
    assert result["num_images"] == 2
    assert len(result["class_names"]) == config.finetune.num_classes


def read_result(folder, kind):
    with open(f"{folder}/evaluation/{kind}.json") as file:
        return json.load(file)
