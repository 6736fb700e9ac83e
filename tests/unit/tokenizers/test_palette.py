"""Palette: exact against brute force in float64, the released file format, and errors."""

from __future__ import annotations

import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.tokenizers.palette import Palette, fit_palette

pytestmark = pytest.mark.once


def brute_force(pixels, centers):
    """Encode one pixel at a time in float64; argmin breaks ties by the lowest index."""
    tokens = []
    for pixel in pixels.reshape(-1, 3):
        unit = pixel.astype(np.float64) / 127.5 - 1
        tokens.append(int(((unit - centers.astype(np.float64)) ** 2).sum(axis=1).argmin()))
    return np.array(tokens).reshape(pixels.shape[:-1])


def brute_force_at_once(pixels, centers):
    differences = (pixels / 127.5 - 1)[:, None] - centers.astype(np.float64)
    return (differences**2).sum(axis=-1).argmin(axis=-1)


@pytest.fixture(scope="module")
def palette():
    random = np.random.default_rng(0)
    return Palette(random.uniform(-1, 1, (512, 3)).astype(np.float32))


def test_encode_matches_brute_force(palette):
    images = np.random.default_rng(1).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    tokens = palette.encode(images)
    assert tokens.dtype == np.uint16
    assert (tokens == brute_force(images, palette.centers)).all()


@pytest.mark.parametrize("num_colors", [1, 2, 3, 64])
def test_ties_take_the_lowest_index(num_colors):
    """With centers repeated on a coarse grid, most pixels are tied."""
    grid = np.array([-1.0, 0.0, 1.0])
    centers = np.stack(np.meshgrid(grid, grid, grid), -1).reshape(-1, 3)
    centers = np.tile(centers, (3, 1))[::-1][:num_colors].astype(np.float32)
    edge = np.arange(0, 256, 15, dtype=np.uint8)
    pixels = np.stack(np.meshgrid(edge, edge, edge), -1)
    assert (Palette(centers).encode(pixels) == brute_force(pixels, centers)).all()


def test_cached_colours_match_uncached(palette):
    images = np.random.default_rng(2).integers(100, 130, (20, 1000, 3), dtype=np.uint8)
    expected = Palette(palette.centers).encode(images)
    warm = Palette(palette.centers)
    assert all((warm.encode(i) == e).all() for i, e in zip(images, expected, strict=True))
    assert (warm.encode(images) == expected).all()
    assert (expected[7] == brute_force(images[7], palette.centers)).all()


def test_threads_that_start_together_encode_as_one_thread_does():
    """A table that two threads create or fill at once must not lose what either has found."""
    random = np.random.default_rng(3)
    centers = random.uniform(-1, 1, (16, 3)).astype(np.float32)
    # Of unequal sizes, so that threads are at different places.
    images = [random.integers(0, 256, (1000 * n, 3), dtype=np.uint8) for n in range(1, 9)]
    expected = [brute_force_at_once(image, centers) for image in images]
    with ThreadPoolExecutor(len(images)) as pool:
        for _ in range(20):
            palette, start = Palette(centers), Barrier(len(images))

            def encode(image, palette=palette, start=start):
                start.wait(timeout=60)
                return palette.encode(image)

            for tokens, right in zip(pool.map(encode, images), expected, strict=True):
                assert (tokens == right).all()


def test_a_pickle_holds_the_colours_and_not_the_table(palette):
    images = np.random.default_rng(5).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    tokens = palette.encode(images)
    content = pickle.dumps(palette)
    copy = pickle.loads(content)
    assert len(content) < 2 * palette.centers.nbytes
    assert (copy.encode(images) == tokens).all()
    assert copy.sha256 == palette.sha256
    assert not copy.centers.flags.writeable


def test_palettes_that_never_encode_take_no_memory(palette):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    kept = [Palette(palette.centers) for _ in range(10)]
    assert resident() - before < len(kept) * (1 << 24)  # half of a filled table each


def test_decode_rounds_centers_and_checks_range(palette):
    tokens = np.arange(512).reshape(16, 32)
    colors = palette.decode(tokens)
    assert colors.shape == (16, 32, 3)
    expected = [[round(127.5 * (float(c) + 1)) for c in center] for center in palette.centers]
    assert colors.reshape(-1, 3).tolist() == expected
    assert Palette(np.array([[-1, 0, 1]])).decode(np.array(0)).tolist() == [0, 128, 255]
    for wrong in (512, -1):
        with pytest.raises(ValueError, match="512"):
            palette.decode(np.array([wrong]))


def test_palette_colours_survive_a_round_trip():
    random = np.random.default_rng(3)
    colors = np.unique(random.integers(0, 256, (100, 3)), axis=0).astype(np.uint8)
    palette = Palette((colors / 127.5 - 1).astype(np.float32))
    assert (palette.decode(palette.encode(colors)) == colors).all()


def test_encode_requires_uint8_rgb(palette):
    for wrong in (np.zeros((4, 4), np.uint8), np.zeros((4, 3), np.float32)):
        with pytest.raises(ValueError, match="uint8"):
            palette.encode(wrong)


def test_save_writes_the_released_format(palette, tmp_path):
    path = tmp_path / "kmeans_centers.npy"
    palette.save(path)
    array = np.load(path, allow_pickle=False)
    assert array.dtype == np.float32
    assert array.shape == (512, 3)
    assert palette.sha256 == hashlib.sha256(array.tobytes()).hexdigest()
    assert Palette.load(path).sha256 == palette.sha256
    assert [p.name for p in tmp_path.iterdir()] == ["kmeans_centers.npy"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((512, 4), np.float32), "shape"),
        (np.zeros((513, 3), np.float32), "shape"),
        (np.zeros((0, 3), np.float32), "shape"),
        (np.zeros(3, np.float32), "shape"),
        (np.zeros((512, 3)), "float32"),
        (np.full((4, 3), 1.5, np.float32), r"\[-1, 1\]"),
        (np.full((4, 3), np.nan, np.float32), r"\[-1, 1\]"),
        (np.array([{}], object), "not a .npy file of numbers"),
    ],
)
def test_invalid_palette_files_raise(tmp_path, array, message):
    path = tmp_path / "palette.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        Palette.load(path)


def test_missing_and_damaged_files_raise(tmp_path, palette):
    path = tmp_path / "palette.npy"
    with pytest.raises(UserError, match="does not exist"):
        Palette.load(path)
    palette.save(path)
    content = path.read_bytes()
    for damaged in (b"", b"junk", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="not a .npy file"):
            Palette.load(path)


def test_fit_recovers_planted_colours():
    random = np.random.default_rng(4)
    planted = np.array([[10, 20, 30], [200, 30, 40], [90, 220, 100], [250, 250, 250]])
    pixels = (planted[random.integers(0, 4, 5000)] + random.integers(-3, 4, (5000, 3))).clip(0, 255)
    pixels = pixels.astype(np.uint8)
    palette, error = fit_palette(pixels, num_colors=4, seed=0)
    found = palette.decode(np.arange(4)).astype(int)
    assert sorted(map(tuple, (found + 5) // 10)) == sorted(map(tuple, (planted + 5) // 10))
    nearest = (palette.centers.astype(np.float64)[palette.encode(pixels)] + 1) * 127.5
    expected = ((pixels - nearest) ** 2).sum(axis=1).mean()
    assert error == pytest.approx(expected, rel=1e-9)


def test_fit_is_deterministic_per_seed():
    pixels = np.random.default_rng(5).integers(0, 256, (5000, 3), dtype=np.uint8)
    first, _ = fit_palette(pixels, num_colors=32, seed=1)
    again, _ = fit_palette(pixels, num_colors=32, seed=1)
    other, _ = fit_palette(pixels, num_colors=32, seed=2)
    assert first.sha256 == again.sha256 != other.sha256


def test_fit_with_too_few_colours_raises():
    pixels = np.tile(np.arange(7, dtype=np.uint8)[:, None], (10, 3))
    with pytest.raises(UserError, match="7 distinct colours, fewer than the requested 8"):
        fit_palette(pixels, num_colors=8, seed=0)
    _, error = fit_palette(pixels, num_colors=7, seed=0)
    assert error < 1
    with pytest.raises(UserError, match="513"):
        fit_palette(pixels, num_colors=513, seed=0)
