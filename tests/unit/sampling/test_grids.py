"""Image grids: layout, enlargement and the source of each pixel."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megavis.data.format.manifest import PALETTE_NAME
from megavis.data.loading.loader import Batch
from megavis.sampling.pictures import (
    completion_grid,
    hide,
    image_grid,
    picture,
    picture_of_reconstructions,
    sample_grid,
    save_png,
)
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.palette import Palette


def images(count, side=4, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (count, side, side, 3)).astype(np.uint8)


def test_grid_enlarges_each_pixel_to_a_block():
    cells = images(6, side=25)
    grid = image_grid([list(cells[:3]), list(cells[3:])])

    assert grid.shape == (2 * (125 + 2) + 2, 3 * (125 + 2) + 2, 3)
    assert (grid[:2] == 255).all()
    assert (grid[:, 127:129] == 255).all()
    for number, cell in enumerate(cells):
        top, left = 2 + number // 3 * 127, 2 + number % 3 * 127
        for y in range(5):
            for x in range(5):
                np.testing.assert_array_equal(grid[top + y :, left + x :][:125:5, :125:5], cell)


def test_small_images_are_enlarged():
    assert image_grid([[images(1, 16)[0]]]).shape == (132, 132, 3)
    assert image_grid([[images(1, 300)[0]]]).shape == (304, 304, 3)


def test_completion_grid_shows_original_input_and_completions():
    originals, completed = images(2), images(2, seed=1)
    given = np.arange(16).reshape(4, 4) < 8

    grid = completion_grid(originals, given, [completed, completed])

    half = originals[1].copy()
    half[2:] = 127
    row = [originals[1], half, completed[1], completed[1]]
    np.testing.assert_array_equal(grid[132:], image_grid([row])[2:])
    np.testing.assert_array_equal(hide(originals, given)[1], half)


def test_empty_cells_are_white():
    grid = sample_grid(images(3), num_columns=2)
    assert grid.shape == (262, 262, 3)
    assert (grid[132:, 132:] == 255).all()
    assert sample_grid(images(1)).shape == (132, 132, 3)


def test_all_reconstructions_are_shown_however_many():
    """Ten images: a row of eight with its reconstructions below, and one of two."""
    originals = torch.from_numpy(images(10))
    objective = SimpleNamespace(
        inputs_from=lambda samples: samples,
        reconstruction=lambda samples: samples // 2,
        shown=lambda samples: samples,
    )
    inference = SimpleNamespace(
        context=SimpleNamespace(device="cpu"), predictions=lambda samples: samples
    )
    grid = picture_of_reconstructions(inference, objective, originals)
    shown, made = list(originals.numpy()), list(originals.numpy() // 2)
    white = [np.full((4, 4, 3), 255, np.uint8)] * 6
    rows = [shown[:8], made[:8], shown[8:] + white, made[8:] + white]
    np.testing.assert_array_equal(grid, image_grid(rows))


def test_ragged_rows_raise():
    with pytest.raises(ValueError, match="same length"):
        image_grid([[images(1)[0]], []])


def test_png_round_trips(tmp_path):
    pixels = images(1, 20)[0]
    save_png(tmp_path / "samples" / "grid.png", pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "samples/grid.png")), pixels)


def test_to_images_decodes_ids_with_the_palette(build, tmp_path):
    objective, _ = build(None, "data.image_size=2")
    Palette(np.array([[-1, -1, -1], [1, 0, -1]], np.float32)).save(tmp_path / PALETTE_NAME)
    pixels = objective.to_images(torch.tensor([[0, 1, 1, 7]]), tmp_path)
    black, orange = [0, 0, 0], [255, 128, 0]
    assert pixels.tolist() == [[[black, orange], [orange, orange]]]


def test_picture_of_samples_and_completions(build, tmp_path):
    objective, inference = build(tmp_path / "c.yaml")
    centers = np.random.default_rng(0).uniform(-1, 1, (32, 3)).astype(np.float32)
    Palette(centers).save(tmp_path / PALETTE_NAME)
    sampler = Sampler(inference, objective, tmp_path)
    assert picture([sampler], None, num_images=9).shape == (2 * 130 + 2, 8 * 130 + 2, 3)

    examples = Batch(torch.randint(32, (2, 16)), torch.tensor([-1, -1]), torch.arange(2))
    drawn = picture([sampler], examples, num_images=2, share=0.5, num_copies=3)

    assert drawn.shape == (2 * 130 + 2, 5 * 130 + 2, 3)
    cells = [drawn[2:130, 2 + c * 130 : (c + 1) * 130] for c in range(5)]
    for cell in cells[1:]:
        np.testing.assert_array_equal(cell[:64], cells[0][:64])
    assert (cells[1][64:] == 127).all()
    # Completions of one image use different draws.
    assert (cells[2] != cells[3]).any()
