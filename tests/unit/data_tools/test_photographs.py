"""The demo's crops: repeatable, balanced, and disjoint between training and validation."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from data_tools.__main__ import main
from data_tools.photographs import cut_crops, load_photograph, photographs, region, share


def test_regions_are_disjoint():
    for photograph in photographs():
        image = load_photograph(photograph)
        owner = np.zeros((image.height, image.width), int)
        for value, split in enumerate(("train", "selection", "validation"), start=1):
            inside = region(image, edge=photograph.held_out, split=split)
            part = owner[
                inside.top : inside.top + inside.height, inside.left : inside.left + inside.width
            ]
            assert part.shape == (inside.height, inside.width)
            assert (part == 0).all()
            part[:] = value
        assert 0.5 < (owner == 1).mean() < 0.65
        assert 0.1 < (owner == 2).mean() < 0.15
        assert 0.17 < (owner == 3).mean() < 0.22


@pytest.mark.parametrize("sides", [None, (4, 12)])
@pytest.mark.parametrize("edge", ["left", "right", "bottom"])
def test_no_pixel_of_one_split_reaches_the_other(edge, sides):
    """Paint all but a region red: none of its crops may show any of it."""
    photograph = next(p for p in photographs() if p.held_out == edge)
    for split in ("train", "selection", "validation"):
        image = Image.new("RGB", (300, 200), (255, 0, 0))
        inside = region(image, edge=edge, split=split)
        right, bottom = inside.left + inside.width, inside.top + inside.height
        image.paste((0, 0, 0), (inside.left, inside.top, right, bottom))
        crops = cut_crops(image, photograph, split=split, count=40, size=16, seed=[1], sides=sides)
        assert all(not np.asarray(crop).any() for crop in crops)


def test_shares():
    counts = [share(25, number=number, parts=10) for number in range(10)]
    assert sum(counts) == 25
    assert max(counts) - min(counts) == 1


def read(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def test_the_command(tmp_path, capsys):
    options = ["--size", "24", "--crops", "25"]
    options += ["--selection-crops", "11", "--validation-crops", "12"]
    assert main(["photographs", str(tmp_path / "a"), *options]) == 0
    files = read(tmp_path / "a")
    assert sum(name.startswith("train/") for name in files) == 25
    assert sum(name.startswith("selection/") for name in files) == 11
    assert sum(name.startswith("validation/") for name in files) == 12
    assert Image.open(tmp_path / "a" / "train" / "china" / "00000.png").size == (24, 24)
    for split in ("train", "selection", "validation"):
        names = sorted(path.name for path in (tmp_path / "a" / split).iterdir())
        assert names == [photograph.name for photograph in photographs()]
    assert main(["photographs", str(tmp_path / "b"), *options]) == 0
    assert read(tmp_path / "b") == files
    capsys.readouterr()
    assert main(["photographs", str(tmp_path / "a"), *options]) == 0
    assert "already" in capsys.readouterr().out
    assert main(["photographs", str(tmp_path / "a"), *options, "--seed", "1"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert read(tmp_path / "a") == files


def test_close_ups_go_on_at_their_border():
    """Of a slope every enlarged crop is a slope, up to its last pixel."""
    slope = np.arange(500, dtype=np.float64)[None, :, None] * np.ones((400, 1, 3)) / 2
    image = Image.fromarray(slope.round().astype(np.uint8))
    photograph = photographs()[0]
    for split in ("train", "validation"):
        crops = cut_crops(
            image, photograph, split=split, count=20, size=32, seed=[0], sides=(16, 16)
        )
        for crop in crops:
            rows = np.asarray(crop, np.float64)[:, :, 1]
            rise = (rows[:, -1] - rows[:, 0]) / 31
            assert np.abs(np.abs(rise) - 0.25).max() < 0.05
            straight = rows[:, :1] + rise[:, None] * np.arange(32)
            assert np.abs(rows - straight).max() <= 1.5
