"""Crops of an image: iGPT's random crops, extreme shapes and small images."""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
import pytest
from image_files import encoded, real_jpegs
from PIL import Image

from data_tools.decode import RefusedImageError, decode_image
from data_tools.resize import Crop, add_crop_arguments, crop_from
from megavis.config.errors import UserError

pytestmark = pytest.mark.once

BICUBIC = Image.Resampling.BICUBIC


@pytest.fixture(scope="module")
def picture():
    return Image.open(real_jpegs()[2]).convert("RGB").resize((500, 375))


def squares(crop, picture, *sizes):
    image = decode_image(encoded(picture, "PNG"))
    return crop.squares(image, sizes=sizes, name="n01/a.JPEG")


@pytest.mark.parametrize("library", ["torch", "pillow"])
def test_random_crops_match_pillow(picture, library):
    """A 224² crop of a shorter side in [256, 384], drawn from seed, number and name."""
    found = squares(Crop("random", count=3, seed=7, library=library), picture, 32, 48)
    for number in range(3):
        digest = hashlib.sha256(f"7\0{number}\0n01/a.JPEG".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        shorter = random.integers(256, 384, endpoint=True)
        resized = picture.resize((round(500 * shorter / 375), shorter), BICUBIC)
        top = random.integers(0, resized.height - 224, endpoint=True)
        left = random.integers(0, resized.width - 224, endpoint=True)
        large = resized.crop((left, top, left + 224, top + 224))
        for size, same in zip((32, 48), found, strict=True):
            expected = np.asarray(large.resize((size, size), BICUBIC)).astype(int)
            difference = np.abs(same[number] - expected)
            assert difference.max() <= (library == "torch")
            assert (difference > 0).mean() < 0.02


@pytest.mark.parametrize("kind", ["center", "evaluation", "random"])
def test_extreme_aspect_ratios_are_refused(kind):
    with pytest.raises(RefusedImageError, match="aspect ratio above 64"):
        Crop(kind).squares(np.zeros((641, 10, 3), np.uint8), sizes=(8,), name="a")


def test_the_largest_aspect_ratio_is_accepted():
    [[square]] = Crop("center").squares(np.zeros((640, 10, 3), np.uint8), sizes=(8,), name="a")
    assert square.shape == (8, 8, 3)


def test_small_images_are_upscaled():
    tiny = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 9, 3), dtype=np.uint8))
    for kind in ("center", "evaluation", "random"):
        assert squares(Crop(kind), tiny, 32)[0][0].shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("shape", "aspect", "area"),
    [
        ((375, 500), (1.0, 1.0), (1.0, 1.0)),  # no square has 80 %: the whole photograph
        ((320, 480), (1.0, 1.0), (1.0, 1.0)),
        ((300, 100), (1.0, 1.0), (1.0, 1.0)),
        ((400, 440), (1.0, 1.0), (0.8, 400 / 440)),
        ((375, 500), (0.75, 1.33), (0.8, 1.0)),
    ],
)
def test_stored_inception_crops_are_givts(shape, aspect, area):
    """givt_imagenet2012.py: 80 to 100 % of the area, ratio 1, or the entire image."""
    height, width = shape
    across = np.linspace(0, 255, width).round().astype(np.uint8)
    down = np.linspace(0, 255, height).round().astype(np.uint8)
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = across[None, :], down[:, None]
    [crops] = Crop("inception", count=60, aspect=aspect).squares(ramp, sizes=(64,), name="a.jpg")
    sides = np.array([[np.ptp(crop[..., c].astype(int)) for c in (0, 1)] for crop in crops])
    shares = sides / 255 * (64 / 63)
    areas = shares.prod(axis=1)
    assert areas.min() == pytest.approx(area[0], abs=0.03)
    assert areas.max() == pytest.approx(area[1], abs=0.03)
    if area[0] < 1 and aspect == (1.0, 1.0):
        assert shares[:, 0] * width == pytest.approx(shares[:, 1] * height, rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--crop", "inception", "--aspect", "2", "1"], "the smaller first"),
        (["--crop", "inception", "--aspect", "0", "1"], "above 0"),
        (["--crop", "inception", "--aspect", "1", "inf"], "above 0"),
        (["--aspect", "1", "2"], "needs --crop inception"),
    ],
)
def test_wrong_aspects_are_refused(options, message):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_crop_arguments(parser, ("center", "inception"))
    with pytest.raises(UserError, match=message):
        crop_from(parser.parse_args(options))
