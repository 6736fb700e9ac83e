"""Every crop on images of any shape, against the papers' recipes written out in plain loops.

A ramp image shows where each output pixel came from, so the tests see only images, never windows.
Area is the share of the image that is seen, aspect the width / height of that part in pixels.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megavis.config.section import DataConfig
from megavis.data.codecs.crops import inception_window
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform

pytestmark = pytest.mark.once

SHAPES = {"square": (384, 384), "4:3": (375, 500), "3:2": (320, 480), "1:3": (600, 200)}
TINY = {"tiny": (7, 9), "one row": (1, 30)}
GIVT, UVIM, MAE = (
    ((0.8, 1.0), (1.0, 1.0)),
    ((0.05, 1.0), (0.75, 1.33)),
    ((0.2, 1.0), (3 / 4, 4 / 3)),
)
COUNT = 300


def ramp(height, width):
    """Return an image whose red grows from left to right and whose green from top to bottom."""
    across = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return np.stack([across, down, 0 * down], axis=-1).round().astype(np.uint8)


def seen(image, crop):
    """Return area and aspect of the part of a ramp that a crop shows."""
    height, width = image.shape[:2]
    # The last row and column are half a pixel inside the part, hence the scale.
    side = crop.shape[0]
    share = [
        float(np.ptp(crop[..., axis].astype(int))) / 255 * side / (side - 1) for axis in (0, 1)
    ]
    return share[0] * share[1], share[0] * width / max(share[1] * height, 1e-9)


def seen_by(transform, height, width):
    """Return areas and aspects, each `[COUNT]`, of a transform's crops of an image."""
    image = ramp(height, width)
    draws = transform.draws(np.arange(COUNT))
    return np.array([seen(image, transform(image, row)) for row in draws]).T


def tensorflow_box(height, width, areas, aspects, dice):
    """Return top, left, height and width of TensorFlow's sample_distorted_bounding_box."""
    least, most = (np.float32(area) * np.float32(width) * np.float32(height) for area in areas)
    for _ in range(100):
        aspect = aspects[0] + dice.random() * (aspects[1] - aspects[0])
        low, high = round((least / aspect) ** 0.5), round((most / aspect) ** 0.5)
        while round(high * aspect) > width or high > height:
            high -= 1
        tall = dice.randint(min(low, high), high)
        wide = round(tall * aspect)
        if tall * wide < least:
            tall, wide = tall + 1, round((tall + 1) * aspect)
        if tall * wide > most:
            tall, wide = tall - 1, round((tall - 1) * aspect)
        if least <= tall * wide <= most and 0 < wide <= width and 0 < tall <= height:
            # Uniform(height - tall): the last place is never drawn.
            top, left = dice.randrange(max(height - tall, 1)), dice.randrange(max(width - wide, 1))
            return top, left, tall, wide
    return 0, 0, height, width


def torchvision_box(height, width, areas, aspects, dice):
    """Return height and width of torchvision's RandomResizedCrop."""
    for _ in range(10):
        target = height * width * dice.uniform(*areas)
        aspect = math.exp(dice.uniform(math.log(aspects[0]), math.log(aspects[1])))
        wide, tall = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return tall, wide
    if width / height < aspects[0]:
        return round(width / aspects[0]), width
    if width / height > aspects[1]:
        return height, round(height * aspects[1])
    return height, width


def igpt_box(height, width, dice):
    """Return height and width, in pixels of the image, of iGPT's crop (section 3.1)."""
    side = 224 * min(height, width) / dice.randint(256, 384)
    return side, side


def expected(box, height, width):
    """Return areas and aspects of `[COUNT]` boxes of height and width."""
    sizes = np.array([box() for _ in range(COUNT)])[:, -2:]
    return sizes.prod(axis=1) / (height * width), sizes[:, 1] / sizes[:, 0]


def distance(one, other):
    """Return the mean distance of the sorted samples: the 1-Wasserstein distance."""
    return np.abs(np.sort(one) - np.sort(other)).mean()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [GIVT, UVIM], ids=["givt", "uvim"])
def test_inception_crops_are_tensorflows(shape, recipe):
    """givt_imagenet2012.py's decode_jpeg_and_inception_crop, and UViM's inception_box."""
    (height, width), (scale, ratio), dice = SHAPES[shape], recipe, random.Random(1)
    transform = Transform(image_size=64, crop="inception", scale=scale, ratio=ratio, seed=3)
    areas, aspects = seen_by(transform, height, width)
    wanted = expected(lambda: tensorflow_box(height, width, scale, ratio, dice), height, width)
    assert distance(areas, wanted[0]) < 0.05
    assert distance(aspects, wanted[1]) < 0.06


@pytest.mark.parametrize("shape", ["4:3", "3:2", "1:3"])
def test_givt_sees_whole_photographs_where_no_square_has_80_percent(shape):
    """The op falls back to the entire image, which is then resized to a square."""
    height, width = SHAPES[shape]
    transform = Transform(image_size=64, crop="inception", scale=GIVT[0], ratio=GIVT[1])
    areas, aspects = seen_by(transform, height, width)
    assert areas == pytest.approx(1.0, abs=0.02)
    assert aspects == pytest.approx(width / height, rel=0.02)


@pytest.mark.parametrize("shape", {**SHAPES, **TINY, "5:4, the limit": (400, 500)})
@pytest.mark.parametrize("recipe", [GIVT, UVIM], ids=["givt", "uvim"])
def test_inception_windows_equal_the_op_draw_for_draw(shape, recipe):
    (height, width), (scale, ratio) = {**SHAPES, **TINY}.get(shape, (400, 500)), recipe
    for draws in np.random.default_rng(5).random((200, 400)):
        window = inception_window(height, width, draws, scale=scale, ratio=ratio)
        found = (window.top, window.left, window.height, window.width)
        assert found == tensorflow_box(height, width, scale, ratio, Dealt(draws))


class Dealt:
    """Deals given draws in the op's order: aspect, height, top, left of each of 100 attempts."""

    def __init__(self, draws):
        self.attempts = iter(draws.reshape(100, 4).tolist())

    def random(self):
        aspect, self.tall, self.top, self.left = next(self.attempts)
        self.places = iter((self.top, self.left))
        return aspect

    def randint(self, low, high):
        return low + int(self.tall * (high - low + 1))

    def randrange(self, count):
        return int(next(self.places) * count)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_resized_crops_are_torchvisions(shape):
    (height, width), dice = SHAPES[shape], random.Random(2)
    config = DataConfig(train="a", image_size=64, crop="random_resized")
    areas, aspects = seen_by(training_transform(config, seed=3), height, width)
    wanted = expected(lambda: torchvision_box(height, width, *MAE, dice), height, width)
    assert distance(areas, wanted[0]) < 0.05
    assert distance(aspects, wanted[1]) < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_crops_are_igpts(shape):
    (height, width), dice = SHAPES[shape], random.Random(4)
    config = DataConfig(train="a", image_size=32, crop="scaled")
    areas, aspects = seen_by(training_transform(config, seed=5), height, width)
    wanted = expected(lambda: igpt_box(height, width, dice), height, width)
    assert distance(areas, wanted[0]) < 0.03
    assert distance(aspects, wanted[1]) < 0.05


@pytest.mark.parametrize("crop", ["random_resized", "scaled", "inception", "center"])
@pytest.mark.parametrize("shape", SHAPES)
def test_held_out_images_give_their_centre(crop, shape):
    """The largest centred square for all: iGPT's section 3.1, resize_small and central_crop."""
    height, width = SHAPES[shape]
    config = DataConfig(train="a", image_size=48, crop=crop)
    image, transform = ramp(height, width), evaluation_transform(config)
    crop = transform(image, transform.draws(np.arange(1))[0])
    area, aspect = seen(image, crop)
    assert area == pytest.approx(min(height, width) / max(height, width), abs=0.03)
    assert aspect == pytest.approx(1.0, abs=0.05)
    assert crop[24, 24, :2].astype(int) == pytest.approx([128, 128], abs=5)


@pytest.mark.parametrize("crop", ["random_resized", "scaled", "inception", "center"])
@pytest.mark.parametrize("shape", [*TINY.values(), (1, 1), (30, 1)])
def test_tiny_images_are_enlarged(crop, shape):
    config = DataConfig(train="a", image_size=16, crop=crop)
    for transform in (training_transform(config, seed=0), evaluation_transform(config)):
        for draws in transform.draws(np.arange(20)):
            assert transform(ramp(*shape), draws).shape == (16, 16, 3)
