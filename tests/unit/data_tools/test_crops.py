"""Crops of an image: iGPT's random crops, extreme shapes and small images."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from image_files import encoded, real_jpegs
from PIL import Image

from data_tools.decode import RefusedImageError, decode_image
from data_tools.resize import Crop

pytestmark = pytest.mark.once

BICUBIC = Image.Resampling.BICUBIC


@pytest.fixture(scope="module")
def picture():
    return Image.open(real_jpegs()[2]).convert("RGB").resize((500, 375))


def squares(crop, picture, *sizes):
    image = decode_image(encoded(picture, "PNG"))
    return crop.squares(image, sizes=sizes, name="n01/a.JPEG")


def test_random_crops_match_pillow(picture):
    """A 224² crop of a shorter side in [256, 384], drawn from seed, number and name."""
    found = squares(Crop("random", count=3, seed=7), picture, 32, 48)
    for number in range(3):
        digest = hashlib.sha256(f"7\0{number}\0n01/a.JPEG".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        shorter = random.integers(256, 384, endpoint=True)
        resized = picture.resize((round(500 * shorter / 375), shorter), BICUBIC)
        top = random.integers(0, resized.height - 224, endpoint=True)
        left = random.integers(0, resized.width - 224, endpoint=True)
        large = resized.crop((left, top, left + 224, top + 224))
        for size, same in zip((32, 48), found, strict=True):
            expected = np.asarray(large.resize((size, size), BICUBIC))
            assert np.array_equal(same[number], expected)


@pytest.mark.parametrize("kind", ["center", "evaluation", "random"])
def test_extreme_aspect_ratios_are_refused(kind):
    with pytest.raises(RefusedImageError, match="aspect ratio above 64"):
        Crop(kind).squares(np.zeros((650, 10, 3), np.uint8), sizes=(8,), name="a")


def test_small_images_are_upscaled():
    tiny = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 9, 3), dtype=np.uint8))
    for kind in ("center", "evaluation", "random"):
        assert squares(Crop(kind), tiny, 32)[0][0].shape == (32, 32, 3)
