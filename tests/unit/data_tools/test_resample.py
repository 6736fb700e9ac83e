"""The compiled resize gives Pillow's bytes: any size, any window, and without numba too."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from PIL import Image

import data_tools
from data_tools import resample as module
from data_tools.resample import resample, trusted_kernels
from megavis.data.codecs.crops import Window

BICUBIC = Image.Resampling.BICUBIC


def random_case(random):
    """An image of noise or of edges, a new size from one pixel on, and a window in it."""
    image = random.integers(0, 256, (*random.integers(1, 200, 2), 4), dtype=np.uint8)
    if random.integers(3) == 0:
        image = np.where(image > 128, np.uint8(255), np.uint8(0))
    height, width = map(int, random.integers(1, 90, 2))
    top, left = int(random.integers(height)), int(random.integers(width))
    rows, columns = random.integers(1, height - top + 1), random.integers(1, width - left + 1)
    return image, height, width, Window(top, left, int(rows), int(columns))


@pytest.mark.parametrize("compiled", [True, False])
def test_equals_pillow(compiled, monkeypatch):
    if compiled:
        assert trusted_kernels() is not None
    else:
        monkeypatch.setattr(module, "trusted_kernels", lambda: None)
    random = np.random.default_rng(1)
    for _ in range(150):
        image, height, width, window = random_case(random)
        ours = resample(image, height=height, width=width, window=window)
        whole = np.asarray(Image.fromarray(image[..., :3]).resize((width, height), BICUBIC))
        rows = slice(window.top, window.top + window.height)
        columns = slice(window.left, window.left + window.width)
        assert np.array_equal(ours[..., :3], whole[rows, columns])


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (3, 5000), (375, 500)])
@pytest.mark.parametrize("wanted", [(1, 1), (64, 64), (1, 300)])
def test_extreme_sizes(size, wanted):
    image = np.random.default_rng(2).integers(0, 256, (*size, 4), dtype=np.uint8)
    ours = resample(image, height=wanted[0], width=wanted[1], window=Window(0, 0, *wanted))
    expected = Image.fromarray(image[..., :3]).resize(wanted[::-1], BICUBIC)
    assert np.array_equal(ours[..., :3], np.asarray(expected))


def test_a_window_is_pillows_box():
    # Scales that floats hold exactly: the box then names the window without rounding.
    random = np.random.default_rng(3)
    for scale in (0.5, 1.25, 4.0, 5.5):
        image = random.integers(0, 256, (int(40 * scale), int(60 * scale), 4), dtype=np.uint8)
        ours = resample(image, height=40, width=60, window=Window(4, 9, 32, 32))
        box = (9 * scale, 4 * scale, 41 * scale, 36 * scale)
        boxed = Image.fromarray(image[..., :3]).resize((32, 32), BICUBIC, box=box)
        assert np.array_equal(ours[..., :3], np.asarray(boxed))


def test_a_view_of_a_larger_image():
    image = np.random.default_rng(4).integers(0, 256, (90, 120, 4), dtype=np.uint8)[5:75:2, ::-1]
    ours = resample(image, height=16, width=50, window=Window(0, 3, 16, 16))
    whole = Image.fromarray(np.ascontiguousarray(image[..., :3])).resize((50, 16), BICUBIC)
    assert np.array_equal(ours[..., :3], np.asarray(whole)[:, 3:19])


def test_pillow_alone_where_numba_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "data_tools.resample_kernels", raising=False)
    monkeypatch.delattr(data_tools, "resample_kernels", raising=False)
    assert trusted_kernels.__wrapped__() is None


def test_pillow_alone_where_the_loops_give_other_bytes(monkeypatch):
    pillow = module._with_pillow
    monkeypatch.setattr(module, "_with_pillow", lambda *a, **b: pillow(*a, **b) ^ 1)
    assert trusted_kernels.__wrapped__() is None
