"""Crops that resize at random and pad, and colour distortion, of images with their label maps."""

import colorsys

import numpy as np
import pytest

from megavis.config.section import DataConfig
from megavis.data.codecs.augment import ColorDistortion
from megavis.data.codecs.crops import PADDING, cut_jittered
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform

pytestmark = pytest.mark.once


def ramp(height, width):
    """An image that says where each pixel is: row, column, 0."""
    rows, columns = np.indices((height, width))
    return np.stack([rows, columns, 0 * rows], axis=-1).astype(np.uint8)


def jittered(image, draws, factor, *, size=8, is_map=True):
    draws = np.array([0.0, *draws])
    options = {"factors": (factor, factor), "size": size, "smoothing": "bilinear"}
    return cut_jittered(image, draws, is_map=is_map, **options)


def test_small_images_are_padded_below_and_to_the_right():
    image = ramp(16, 24) + 1
    crop = jittered(image, (0.5, 0.5), 0.5)
    # The shorter side is 4, the longer 6: pixels 2, 6, ... of the original.
    assert crop[:4, :6, 0].tolist() == [[row + 1] * 6 for row in (2, 6, 10, 14)]
    assert crop[:4, :6, 1].tolist() == [[column + 1 for column in range(2, 24, 4)]] * 4
    assert not crop[4:].any()
    assert not crop[:, 6:].any()
    shown = jittered(image, (0.5, 0.5), 0.5, is_map=False)
    assert (shown[4:] == PADDING).all()
    assert (shown[:4, 6:] == PADDING).all()


@pytest.mark.parametrize(("draw", "first"), [(0.0, 0), (0.5, 4), (0.999, 8)])
def test_large_images_are_cut_at_random(draw, first):
    """16 rows leave 9 places for 8."""
    crop = jittered(ramp(16, 16), (draw, 0.0), 2.0)
    assert crop[:, 0, 0].tolist() == list(range(first, first + 8))
    assert crop[0, :, 1].tolist() == list(range(8))


def test_image_and_map_are_cut_alike():
    """A map of classes that an image shows as brightness, under many draws."""
    random = np.random.default_rng(0)
    classes = (random.integers(0, 2, (6, 9)) * 255).astype(np.uint8).repeat(8, 0).repeat(8, 1)
    image = np.repeat(classes[..., None], 3, axis=-1)
    data = DataConfig(train="x", image_size=32, crop="jittered", jitter=(0.4, 2.5), flip=True)
    transform = training_transform(data, seed=3)
    for draws in transform.draws(np.arange(40)):
        shown, mapped = transform(image, draws), transform(image, draws, is_map=True)
        # Away from edges, where resizing mixes, and from padding, grey in one and 0 in the other.
        sharp = (shown == 0) | (shown == 255)
        assert sharp.mean() > 0.1
        assert (shown[sharp] == mapped[sharp]).mean() > 0.99


def test_held_out_images_keep_their_aspect():
    data = DataConfig(train="x", image_size=8, crop="jittered")
    transform = evaluation_transform(data)
    crop = transform(ramp(8, 24), transform.draws(np.arange(1))[0], is_map=True)
    assert crop[..., 1].tolist() == [list(range(8, 16))] * 8


def test_places_cover_the_image_evenly():
    transform = Transform(8, crop="jittered", jitter=(2.0, 2.0))
    draws = transform.draws(np.arange(2000))
    tops = [int(transform(ramp(16, 16), each, is_map=True)[0, 0, 0]) for each in draws]
    counts = np.bincount(tops, minlength=9)
    assert counts.shape == (9,)
    assert (np.abs(counts - 2000 / 9) < 60).all()


def color(pixel, last=0.9, **amounts):
    """Distort one pixel; amounts in [0, 1) by name, the others are left out.

    Contrast comes last if `last` is below 0.5.
    """
    names = ("brightness", "contrast", "saturation", "hue")
    draws = [
        part for name in names for part in (0.9 - 0.9 * (name in amounts), amounts.get(name, 0))
    ]
    image = np.array([[pixel]], np.uint8)
    return ColorDistortion()(image, np.array([*draws, last]))[0, 0].tolist()


def test_colors_change_as_said():
    assert color((10, 100, 200)) == [10, 100, 200]
    assert color((10, 100, 200), brightness=1.0) == [42, 132, 232]
    assert color((10, 100, 250), brightness=0.0) == [0, 68, 218]
    assert color((10, 100, 200), contrast=1.0) == [15, 150, 255]
    assert color((10, 100, 200), contrast=0.0) == [5, 50, 100]
    # Brighter, then 1.5 times that.
    amounts = {"brightness": 1.0, "contrast": 1.0}
    assert color((10, 20, 88), **amounts) == color((10, 20, 88), 0.1, **amounts) == [63, 78, 180]
    # Above 255 before the saturation is halved, or after it.
    amounts = {"contrast": 1.0, "saturation": 0.0}
    assert color((0, 0, 200), **amounts) == pytest.approx([127, 127, 255], abs=1)
    assert color((0, 0, 200), 0.1, **amounts) == pytest.approx([150, 150, 255], abs=2)


@pytest.mark.parametrize(("saturation", "hue"), [(1.0, 0.5), (0.0, 0.5), (0.5, 1.0), (0.5, 0.0)])
def test_saturation_and_hue_equal_colorsys(saturation, hue):
    pixel = (30, 120, 200)
    h, s, v = colorsys.rgb_to_hsv(*(part / 255 for part in pixel))
    turned = (h + 0.1 * (2 * hue - 1)) % 1.0, min(1.0, s * (0.5 + saturation)), v
    expected = [255 * part for part in colorsys.hsv_to_rgb(*turned)]
    found = color(pixel, saturation=saturation, hue=hue)
    assert np.abs(np.array(found) - expected).max() < 6


def test_maps_keep_their_numbers():
    data = DataConfig(train="x", image_size=8, crop="jittered", color_distortion=True)
    transform = training_transform(data, seed=0)
    plain = training_transform(data.model_copy(update={"color_distortion": False}), seed=0)
    draws, without = transform.draws(np.arange(8)), plain.draws(np.arange(8))
    for row, other in zip(draws, without, strict=True):
        image = ramp(20, 20)
        assert (transform(image, row, is_map=True) == plain(image, other, is_map=True)).all()
    assert any(
        (transform(ramp(20, 20), row) != plain(ramp(20, 20), other)).any()
        for row, other in zip(draws, without, strict=True)
    )
