"""Crops of photographs: deterministic, balanced, disjoint between splits."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from data_tools.__main__ import main
from data_tools.photographs import (
    cut_close_ups,
    cut_crops,
    cut_region,
    load_photograph,
    photographs,
    region,
    share,
)

pytestmark = pytest.mark.once


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


@pytest.mark.parametrize("edge", ["left", "right", "bottom"])
def test_crops_stay_in_their_region(edge):
    """Crops of a region show none of the red outside it."""
    photograph = next(p for p in photographs() if p.held_out == edge)
    for split in ("train", "selection", "validation"):
        image = Image.new("RGB", (300, 200), (255, 0, 0))
        inside = region(image, edge=edge, split=split)
        right, bottom = inside.left + inside.width, inside.top + inside.height
        image.paste((0, 0, 0), (inside.left, inside.top, right, bottom))
        crops = cut_crops(image, photograph, split=split, count=40, size=16, seed=[1])
        assert all(not np.asarray(crop).any() for crop in crops)
        assert not np.asarray(cut_region(image, edge=edge, split=split)).any()


def test_share():
    counts = [share(25, number=number, parts=10) for number in range(10)]
    assert sum(counts) == 25
    assert max(counts) - min(counts) == 1


def read(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def test_photographs_command(tmp_path, capsys):
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


def close_ups(image, *, sides=(5, 12), turned=False, count=20):
    options = {"count": count, "size": 32, "seed": [0]}
    cut = cut_close_ups(image, sides=sides, turned=turned, **options)
    return np.stack([np.asarray(crop, np.float64) for crop in cut])


def test_close_ups_use_pixels_beyond_their_border():
    """Enlarged squares of a linear ramp are linear up to the last pixel."""
    slope = np.arange(240, dtype=np.float64)[None, :, None] * np.ones((200, 1, 3))
    rows = close_ups(Image.fromarray(slope.astype(np.uint8)), sides=(28, 40))[..., 1]
    # The deviation of a slope of 32 steps of height r is r · √((32² - 1) / 12).
    rise = 50 / ((32**2 - 1) / 12) ** 0.5
    expected = 127.5 + rise * (np.arange(32) - 15.5)
    assert np.abs(rows - expected).max() < 1.5 * rise


def test_close_ups_are_normalized_and_not_flat():
    """Squares come from the striped half of an image that is flat elsewhere."""
    stripes = np.full((120, 120, 3), (200, 30, 90), np.uint8)
    stripes[:, :60] += np.where(np.arange(60) // 4 % 2, 10, -10).astype(np.uint8)[:, None]
    found = close_ups(Image.fromarray(stripes), turned=True)
    assert np.abs(found.mean((1, 2)) - 127.5).max() < 1
    assert np.abs(found.std((1, 2)) - 50).max() < 1
    directions = np.abs(np.diff(found, axis=1)).sum((1, 2, 3)) > np.abs(np.diff(found, axis=2)).sum(
        (1, 2, 3)
    )
    assert 0 < directions.sum() < len(directions)
    flat = close_ups(Image.new("RGB", (60, 60), (9, 9, 9)), count=2)
    assert (np.abs(flat - 127.5) < 1).all()
