"""Random Erasing and Repeated Augmentation against timm's, and DeiT's shift."""

import random

import numpy as np
import pytest
import torch
from timm_alone import timm_module

from megavis.config.errors import UserError
from megavis.data.codecs.augment import NUM_ERASING_DRAWS, RandomErasing
from megavis.data.codecs.crops import shift
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.data.loading.order import RepeatedOrder, SampleOrder

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(2)
IMAGE = np.full((224, 160, 3), 7, np.uint8)


class Replay:
    """Python's `random` with given draws; integers are derived from them as in megavis."""

    def __init__(self, draws):
        self.draws = iter(draws)

    def random(self):
        return next(self.draws)

    def uniform(self, low, high):
        return low + next(self.draws) * (high - low)

    def randint(self, low, high):
        return low + int(next(self.draws) * (high - low + 1))


def erased(before, after):
    return (np.asarray(before) != np.asarray(after)).any(axis=-1)


@pytest.mark.parametrize(("height", "width"), [(224, 160), (40, 120)])
def test_erased_rectangle_matches_timm(monkeypatch, height, width):
    """In the flat image several attempts fail, some by a rectangle as high as the image."""
    timm = timm_module("data", "random_erasing")
    theirs = timm.RandomErasing(probability=0.25, mode="pixel", device="cpu")
    ours, found, area_of_all = RandomErasing(0.25), 0, height * width
    image = np.full((height, width, 3), 7, np.uint8)
    for _ in range(300):
        # The probability, the seed of the noise and four numbers for each of ten attempts.
        draws = RANDOM.random(42)
        # timm draws top and left only of a rectangle that fits.
        replay = [draws[0]]
        for area, ratio, top, left in draws[2:].reshape(-1, 4):
            replay += [area, ratio]
            target = area_of_all * (0.02 + area * (1 / 3 - 0.02))
            shape = 0.3 * (1 / 0.09) ** ratio
            sides = round((target * shape) ** 0.5), round((target / shape) ** 0.5)
            if sides[0] < height and sides[1] < width:
                replay += [top, left]
        monkeypatch.setattr(timm, "random", Replay(replay))
        picture = torch.zeros(3, height, width)
        expected = (theirs(picture) != 0).any(0).numpy()
        mask = erased(image, ours(image, draws))
        # Noise may equal the image in all three channels of a few pixels.
        assert not (mask & ~expected).any()
        assert mask.sum() == pytest.approx(expected.sum(), abs=3)
        found += expected.any()
    assert 40 < found < 110


def test_erasing_gives_up_after_ten_attempts():
    """Nine rectangles are higher than the image; the tenth fits, with 2 % of the area."""
    draws = np.array([0.0, 0.5, *[0.99, 0.99, 0.5, 0.5] * 9, *[0.0, 0.5, 0.5, 0.5]])
    image = np.full((20, 160, 3), 7, np.uint8)
    assert len(draws) == NUM_ERASING_DRAWS
    assert erased(image, RandomErasing(1.0)(image, draws)).sum() == round(0.02 * 20 * 160)
    draws[-3] = 0.99
    draws[-4] = 0.99
    assert RandomErasing(1.0)(image, draws) is image


def test_noise_has_imagenet_statistics():
    draws = np.array([0.0, 0.3, 0.99, 0.5, *RANDOM.random(NUM_ERASING_DRAWS - 4)])
    image = RandomErasing(1.0)(IMAGE, draws)
    noise = image[erased(IMAGE, image)]
    assert len(noise) == pytest.approx(224 * 160 * 0.33, rel=0.02)
    # Clipping to 0..255 affects 2 % on either side.
    np.testing.assert_allclose(noise.mean(0), 255 * np.array((0.485, 0.456, 0.406)), atol=2.5)
    np.testing.assert_allclose(noise.std(0), 255 * np.array((0.229, 0.224, 0.225)), atol=3.5)
    np.testing.assert_array_equal(RandomErasing(1.0)(IMAGE, draws), image)


def test_erasing_is_applied_last_and_refused_for_ids(image_shards, folder):
    plain = {"image_size": 16, "crop": "shifted", "flip": True, "seed": 3}
    erase = RandomErasing(1.0)
    some, _ = ShardDataset(image_shards / "train", Transform(**plain, erase=erase)).read(
        np.arange(20), positions=np.arange(100, 120)
    )
    before, _ = ShardDataset(image_shards / "train", Transform(**plain)).read(
        np.arange(20), positions=np.arange(100, 120)
    )
    draws = Transform(**plain, erase=erase).draws(np.arange(100, 120))
    for place in range(20):
        np.testing.assert_array_equal(
            some[place], erase(before[place], draws[place, -NUM_ERASING_DRAWS:])
        )
    with pytest.raises(UserError, match=r"remove data\.random_erasing"):
        ShardDataset(folder[0], Transform(image_size=4, erase=erase))


def test_shift_pads_with_zeros():
    """`RandomCrop(32, padding=4)` of torchvision, in a loop."""
    image = RANDOM.integers(1, 256, (32, 32, 3)).astype(np.uint8)
    for top, left in ((0, 0), (4, 4), (8, 3)):
        moved = shift(image, np.array([(top + 0.5) / 9, (left + 0.5) / 9]), border="zeros")
        for row, column in ((0, 0), (0, 31), (13, 7), (31, 31)):
            y, x = row + top - 4, column + left - 4
            inside = 0 <= y < 32 and 0 <= x < 32
            assert moved[row, column].tolist() == (image[y, x].tolist() if inside else [0, 0, 0])


def test_repeated_order():
    single, repeated = SampleOrder(960, 5), RepeatedOrder(SampleOrder(960, 5), 3)
    seen = repeated.dataset_index(np.arange(2880))
    assert np.bincount(seen).tolist() == [3] * 960
    # Blocks of 32 images, each three times.
    expected = []
    for start in range(0, 960, 32):
        expected += 3 * single.dataset_index(np.arange(start, start + 32)).tolist()
    assert seen.tolist() == expected
    assert (seen[::2] != seen[1::2]).all()


def test_repeated_epoch_matches_deits_sampler(monkeypatch):
    monkeypatch.setattr(random, "seed", lambda *_: None)
    timm = timm_module("data", "distributed_sampler")
    sampler = timm.RepeatAugSampler(range(7680), num_replicas=4, rank=0, num_repeats=3)
    theirs = [
        list(timm.RepeatAugSampler(range(7680), num_replicas=4, rank=rank, num_repeats=3))
        for rank in range(4)
    ]
    assert len(sampler) * 4 == 7680
    distinct = {index for rank in theirs for index in rank}
    ours = RepeatedOrder(SampleOrder(7680, 0), 3).dataset_index(np.arange(7680))
    assert len(distinct) == len(set(ours.tolist())) == 2560


def test_repeats_have_independent_draws(image_shards):
    transform = Transform(image_size=8, crop="window", flip=True, seed=1)
    dataset = ShardDataset(image_shards / "train", transform)
    with BatchLoader(
        dataset,
        seed=0,
        micro_batch_size=96,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        repeats=3,
    ) as loader:
        batch = next(loader)
    labels, images = batch.labels.reshape(3, 32), batch.inputs.reshape(3, 32, -1)
    assert (labels == labels[0]).all()
    assert (images[0] != images[1]).any(-1).float().mean() > 0.9
