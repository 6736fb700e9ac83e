"""Repeating a demo gives byte-identical data, palettes and weights."""

import hashlib
from pathlib import Path

import pytest
from children import in_child

from data_tools.__main__ import main as data_tools
from megavis.cli import main

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
FEW = ["--images", "52", "--selection-images", "26", "--validation-images", "26"]
PARTS = ("train", "selection", "validation")
SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2"]
THREE_STEPS = [*SMALL, "training.steps=3", "training.validate_every=3", "schedule.warmup_steps=1"]


def make_all():
    """Run the steps of launch/demo.sh in the current folder with few images and small models."""
    fit = ["--out", "demo/palette.npy", "--size", "12", "--num-colors", "16"]
    tokens = ["--palette", "demo/palette.npy", "--size", "12"]
    steps = [
        ["letters", "demo/letters", *FEW],
        ["palette", "fit", "demo/letters/train", *fit],
        *(
            ["palette", "shards", f"demo/letters/{part}", "--out", f"demo/{part}", *tokens]
            for part in PARTS
        ),
        ["letters", "demo/letters_32", "--size", "32", *FEW],
        *(
            ["jpeg", f"demo/letters_32/{part}", "--out", f"demo/{part}_32", "--size", "32"]
            for part in PARTS
        ),
    ]
    assert [data_tools(step) for step in steps] == [0] * len(steps)
    for paper in ("igpt", "mp3"):
        config = str(CONFIGS / paper / "demo.yaml")
        assert main(["train", config, "--device", "cpu", *THREE_STEPS]) == 0


def hashes(folder):
    """Return the SHA-256 of each image, shard, index, palette and weights file below a folder.

    `report.json` is excluded: it records the speed and peak memory of writing shards.
    """
    files = [*(folder / "demo").rglob("*"), *(folder / "runs").rglob("*.safetensors")]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file() and path.name != "report.json"
    }


@pytest.mark.once
def test_demo_is_byte_identical_when_repeated(tmp_path):
    made = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        in_child(make_all, folder=tmp_path / name)
        made.append(hashes(tmp_path / name))
    first, again = made
    suffixes = [Path(path).suffix for path in first]
    assert suffixes.count(".npy") == 4
    assert suffixes.count(".tar") == 6
    assert suffixes.count(".safetensors") >= 2
    assert {path for path in {**first, **again} if first.get(path) != again.get(path)} == set()
