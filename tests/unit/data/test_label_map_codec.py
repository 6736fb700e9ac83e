"""Label maps in training: cropped with their images, nearest-neighbour resized, renumbered."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scene_shards import write_scene_shards

from megavis.config.errors import UserError
from megavis.data.codecs.crops import NUM_WINDOW_DRAWS, random_window, resize
from megavis.data.codecs.label_maps import nearest, painted, renumbered, to_numbers, to_pixels
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scene_shards(tmp_path_factory.mktemp("scenes"), size=48)


def test_numbers_round_trip():
    numbers = np.array([[0, 1, 255, 256], [65535, 65536, 12345678, 2**24 - 1]])
    assert (to_numbers(to_pixels(numbers)) == numbers).all()
    assert to_pixels(np.array([[7 + 256 * 9 + 65536 * 11]])).tolist() == [[[7, 9, 11]]]


@pytest.mark.parametrize(("height", "width"), [(7, 5), (48, 48), (20, 90), (1, 1)])
def test_nearest_matches_torch(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 41, 3), dtype=np.uint8)
    batch = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    theirs = F.interpolate(batch, size=(height, width), mode="nearest-exact")[0]
    ours = nearest(pixels, height=height, width=width)
    assert (ours == theirs.permute(1, 2, 0).numpy()).all()


def test_bilinear_resize_matches_loops():
    pixels = np.random.default_rng(1).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    height, width = 5, 21
    resized = resize(pixels, height=height, width=width, smoothing="bilinear")
    for row in range(height):
        for column in range(width):
            y = min(max((row + 0.5) * 9 / height - 0.5, 0), 8)
            x = min(max((column + 0.5) * 13 / width - 0.5, 0), 12)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, 8), min(left + 1, 12)
            above = pixels[top, left] * (1 - (x - left)) + pixels[top, right] * (x - left)
            below = pixels[bottom, left] * (1 - (x - left)) + pixels[bottom, right] * (x - left)
            mixed = above * (1 - (y - top)) + below * (y - top)
            assert np.abs(resized[row, column] - mixed).max() <= 1.0


def test_segments_are_numbered_by_their_centres():
    random = np.random.default_rng(2)
    segments = random.choice([0, 3, 7, 200, 255], (12, 17)).astype(np.uint8)
    pixels = np.stack([segments % 5, segments, segments % 2], axis=-1)
    centres = []
    for segment in (3, 7, 200, 255):
        places = [(y, x) for y in range(12) for x in range(17) if segments[y, x] == segment]
        rows, columns = zip(*places, strict=True)
        key = 12 * sum(rows) / len(rows) + sum(columns) / len(columns)
        centres.append((key, segment))
    expected = np.zeros_like(segments)
    for number, (_, segment) in enumerate(sorted(centres), start=1):
        expected[segments == segment] = number
    changed = renumbered(pixels)
    assert (changed[..., 1] == expected).all()
    assert (changed[..., [0, 2]] == pixels[..., [0, 2]]).all()


def test_image_and_map_are_cropped_alike(folder):
    transform = Transform(
        image_size=24, crop="random_resized", scale=(0.05, 1.0), flip=True, seed=3
    )
    dataset = ShardDataset(folder / "panoptic" / "train", transform)
    whole = ShardDataset(folder / "panoptic" / "train", Transform(image_size=48, crop="center"))
    originals, _ = whole.read(np.arange(12))
    positions = np.arange(100, 112)
    pairs, _ = dataset.read(np.arange(12), positions=positions)
    draws = transform.draws(positions)
    assert {0.0, 1.0} == set(draws[:, 0].tolist())
    for row in range(12):
        window = random_window(
            48, 48, draws[row, 1 : 1 + NUM_WINDOW_DRAWS], scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3)
        )
        rows = slice(window.top, window.top + window.height)
        columns = slice(window.left, window.left + window.width)
        picture, maps = (each[rows, columns] for each in originals[row])
        expected = resize(picture, height=24, width=24, smoothing="bilinear")
        labels = renumbered(nearest(maps, height=24, width=24))
        if draws[row, 0]:
            expected = expected[:, ::-1]
            labels = renumbered(nearest(maps, height=24, width=24)[:, ::-1])
        assert (pairs[row, 0] == expected).all()
        assert (pairs[row, 1] == labels).all()


def test_evaluation_resizes_whole_images(folder):
    dataset = ShardDataset(folder / "depth" / "validation", Transform(24, crop="center"))
    whole = ShardDataset(folder / "depth" / "validation", Transform(48, crop="center"))
    small, _ = dataset.read(np.arange(6))
    large, _ = whole.read(np.arange(6))
    # The centre of a new pixel is the corner of four; nearest rounds to the last.
    assert (small[:, 1] == large[:, 1, 1::2, 1::2]).all()


def test_unsupported_transforms(folder):
    path = folder / "panoptic" / "train"
    with pytest.raises(UserError, match="set data.crop to inception, random_resized or jittered"):
        ShardDataset(path, Transform(image_size=48, crop="none"))
    with pytest.raises(UserError, match="many sizes; set data.crop"):
        ShardDataset(path)


def test_painted_colours():
    numbers = np.array([[0, 1 + 256, 1 + 512, 2 + 256 * 3]])
    colors = painted(to_pixels(numbers), "panoptic")[0]
    assert colors[0].tolist() == [0, 0, 0]
    assert len({tuple(color) for color in colors.tolist()}) == 4
    grey = painted(to_pixels(np.array([[0, 10_000, 40_000, 90_000]])), "depth")[0, :, 0]
    assert grey[0] == 0
    assert grey[1] > grey[2] > grey[3] > 0
    assert grey[2] == 128
