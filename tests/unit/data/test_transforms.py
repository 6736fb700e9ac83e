"""Crops against Pillow, against the recipe in plain loops, and their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from megavis.config.section import DataConfig
from megavis.data.codecs.codec import PaletteCodec
from megavis.data.codecs.crops import WrongSizeError, mirror, random_window, resize
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)
SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)


def picture(height, width):
    """Return a smooth random image, since resizing noise amplifies rounding."""
    small = RANDOM.integers(0, 256, (6, 7, 3)).astype(np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.array(image)


def window_by_the_recipe(height, width, draws):
    """Return the random resized crop of MAE's recipe; None if no attempt fits."""
    for attempt in range(10):
        area_draw, ratio_draw, top_draw, left_draw = draws[4 * attempt : 4 * attempt + 4]
        share = 0.2 + 0.8 * area_draw
        aspect = (3 / 4) * ((4 / 3) / (3 / 4)) ** ratio_draw
        w = round((share * height * width * aspect) ** 0.5)
        h = round((share * height * width / aspect) ** 0.5)
        if w <= width and h <= height:
            top = min(int(top_draw * (height - h + 1)), height - h)
            left = min(int(left_draw * (width - w + 1)), width - w)
            return top, left, h, w
    return None


def test_windows_match_the_recipe():
    found = 0
    for height, width in ((375, 500), (500, 375), (64, 64), (40, 200)):
        for draws in RANDOM.random((100, 40)):
            window = random_window(height, width, draws, scale=SCALE, ratio=RATIO)
            expected = window_by_the_recipe(height, width, draws)
            if expected is not None:
                found += 1
                assert (window.top, window.left, window.height, window.width) == expected
    assert found > 300  # in the widest image most attempts fail


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (10, 1000, (0, 493, 10, 13)),
        (1000, 10, (493, 0, 13, 10)),
        (1, 1, (0, 0, 1, 1)),
        (1, 99, (0, 49, 1, 1)),
    ],
)
def test_fallback_is_the_centre(height, width, expected):
    window = random_window(height, width, np.full(40, 0.999), scale=SCALE, ratio=RATIO)
    assert (window.top, window.left, window.height, window.width) == expected


def test_window_areas_and_positions_are_uniform():
    """In a square image every attempt fits: areas are uniform, positions too."""
    windows = [
        random_window(400, 400, draws, scale=(0.2, 0.5), ratio=RATIO)
        for draws in RANDOM.random((2000, 40))
    ]
    shares = np.array([w.height * w.width / 160_000 for w in windows])
    assert abs(shares.mean() - 0.35) < 5 * 0.3 / math.sqrt(12 * 2000)
    places = np.array([w.top / (400 - w.height) for w in windows])
    assert abs(places.mean() - 0.5) < 5 / math.sqrt(12 * 2000)


def test_random_crop_matches_pillow():
    transform = Transform(image_size=24, crop="random_resized", flip=True, seed=9)
    image = picture(60, 90)
    positions = np.array([3, 10**12, 4, 5, 6])
    draws = transform.draws(positions)
    assert 0 < draws[:, 0].sum() < 5
    for row in draws:
        top, left, height, width = window_by_the_recipe(60, 90, row[1:])
        part = Image.fromarray(image[top : top + height, left : left + width])
        expected = np.asarray(part.resize((24, 24), Image.Resampling.BICUBIC)).astype(int)
        if row[0]:
            expected = expected[:, ::-1]
        assert np.abs(transform(image, row) - expected).max() <= 2


@pytest.mark.parametrize(("height", "width", "side"), [(50, 77, 32), (91, 40, 24), (24, 24, 24)])
def test_centre_crop_matches_pillow(height, width, side):
    image = picture(height, width)
    transform = Transform(image_size=24, crop="center", short_side=side)
    scale = side / min(height, width)
    new = (round(height * scale), round(width * scale))
    resized = Image.fromarray(image).resize(new[::-1], Image.Resampling.BICUBIC)
    top, left = (new[0] - 24) // 2, (new[1] - 24) // 2
    expected = np.asarray(resized)[top : top + 24, left : left + 24].astype(int)
    result = transform(image, transform.draws(np.array([0]))[0])
    assert result.shape == (24, 24, 3)
    assert np.abs(result - expected).max() <= 2


def test_no_crop_changes_nothing():
    image = picture(24, 24)
    transform = Transform(image_size=24)
    assert (transform(image, transform.draws(np.array([7]))[0]) == image).all()
    with pytest.raises(WrongSizeError, match="24x24"):
        transform(picture(24, 25), np.zeros(1))


def test_draws_depend_on_seed_and_position_only():
    transform = Transform(image_size=24, crop="random_resized", flip=True, seed=9)
    positions = np.array([5, 17, 5])
    draws = transform.draws(positions)
    assert (draws[0] == draws[2]).all()
    assert (transform.draws(positions[1:2])[0] == draws[1]).all()
    other = Transform(image_size=24, crop="random_resized", flip=True, seed=10)
    assert (other.draws(positions)[:, 1:] != draws[:, 1:]).mean() > 0.99


def test_shifts_are_uniform():
    ids = np.arange(100, dtype=np.uint16)
    padded = np.pad(ids.reshape(10, 10), 4, mode="reflect")
    outcomes = {}
    for top in range(9):
        for left in range(9):
            crop = padded[top : top + 10, left : left + 10]
            outcomes[crop.tobytes()] = outcomes[crop[:, ::-1].tobytes()] = 0
    assert len(outcomes) == 162
    codec = PaletteCodec(100, transform=Transform(image_size=10, crop="shifted", flip=True))
    payload = np.frombuffer(codec.encode(ids), np.uint8)
    moved, refused = codec.decode([payload] * 8100, np.arange(8100))
    assert not refused
    for image in moved:
        outcomes[image.tobytes()] += 1
    # 8,100 draws of 162 outcomes: chi-squared with 161 degrees of freedom, 161 ± 18.
    chi_squared = sum((count - 50) ** 2 / 50 for count in outcomes.values())
    assert 161 - 5 * 18 < chi_squared < 161 + 5 * 18


def test_pixels_and_ids_are_shifted_alike():
    transform = Transform(image_size=10, crop="shifted", flip=True, seed=3)
    ids = np.arange(100, dtype=np.uint8).reshape(10, 10)
    for draws in transform.draws(np.arange(20)):
        assert (
            transform(ids[:, :, None].repeat(3, 2), draws)[:, :, 1] == transform(ids, draws)
        ).all()
    with pytest.raises(WrongSizeError):
        transform(ids[1:], draws)


def test_palette_windows_are_uniform():
    ids = np.arange(99, 0, -1, dtype=np.uint16)[:81].reshape(9, 9)
    outcomes = {}
    for top in range(4):
        for left in range(4):
            square = ids[top : top + 6, left : left + 6]
            outcomes[square.tobytes()] = outcomes[square[:, ::-1].tobytes()] = 0
    codec = PaletteCodec(81, transform=Transform(image_size=6, crop="window", flip=True, seed=3))
    payload = np.frombuffer(codec.encode(ids), np.uint8)
    squares, refused = codec.decode([payload] * 1600, np.arange(1600))
    assert squares.shape == (1600, 36)
    assert not refused
    for square in squares:
        outcomes[square.tobytes()] += 1
    # 1,600 draws of 32 outcomes: chi-squared with 31 degrees of freedom, 31 ± 7.9.
    assert sum((count - 50) ** 2 / 50 for count in outcomes.values()) < 31 + 5 * 7.9
    again, _ = codec.decode([payload] * 3, np.arange(70, 73))
    assert (again == squares[70:73]).all()


def test_pixel_windows():
    image = picture(7, 10)
    for draws in Transform(5, crop="window", seed=1).draws(np.arange(20)):
        top, left = int(draws[1] * 3), int(draws[2] * 6)
        expected = image[top : top + 5, left : left + 5]
        assert (Transform(5, crop="window")(image, draws) == expected).all()
    config = DataConfig(train="a", validation="b", image_size=5, crop="window")
    validation = evaluation_transform(config)
    (draws,) = validation.draws(np.arange(1))
    assert (validation(image, draws) == image[1:6, 2:7]).all()
    with pytest.raises(WrongSizeError, match="smaller than 5x5"):
        validation(image[:4], draws)


@pytest.mark.parametrize("shape", [(300, 400), (20, 31), (24, 24), (7, 150)])
def test_resize_and_mirror_match_torch(shape):
    """A view of a larger channels-last image."""
    height, width = shape
    image = RANDOM.integers(0, 256, (310, 410, 3)).astype(np.uint8)[5 : 5 + height, 3 : 3 + width]
    planes = torch.from_numpy(image.transpose(2, 0, 1).copy())[None]
    expected = F.interpolate(planes, size=(24, 24), mode="bicubic", antialias=True)
    result = resize(image, height=24, width=24)
    assert (result == expected[0].numpy().transpose(1, 2, 0)).all()
    assert (mirror(image) == image[:, ::-1]).all()
    assert (mirror(result) == result[:, ::-1]).all()


def test_aspect_1_crops_are_square():
    """GIVT, appendix C.2, and its released code: square crops of 80 to 100 % of the area."""
    config = DataConfig(
        train="a", image_size=8, crop="random_resized", scale=(0.8, 1.0), aspect=(1, 1)
    )
    transform = training_transform(config, seed=0)
    assert transform.ratio == (1, 1)
    for draws in RANDOM.random((100, 40)):
        window = random_window(300, 300, draws, scale=transform.scale, ratio=transform.ratio)
        assert window.height == window.width
        assert 0.8**0.5 * 300 - 1 <= window.height <= 300
