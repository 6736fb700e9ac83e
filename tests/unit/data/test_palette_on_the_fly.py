"""JPEG shards read as palette ids, with iGPT's augmentation (section 3.1)."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.config.section import DataConfig
from megavis.data.codecs.crops import cut_scaled
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform
from megavis.data.format.manifest import Preparation
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(5)
BICUBIC = Image.Resampling.BICUBIC
PALETTE = Palette(RANDOM.uniform(-1, 1, (40, 3)).astype(np.float32))
CONFIG = DataConfig(train="x", image_size=32, crop="scaled")
POSITIONS = np.arange(6)


def photograph(width, height):
    small = RANDOM.integers(0, 256, (6, 7, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), BICUBIC)


@pytest.fixture(scope="module")
def images():
    return [photograph(*size) for size in ((500, 375), (375, 500), (300, 240), (640, 427))]


@pytest.fixture
def folder(images, tmp_path):
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files, strict=True):
        image.save(file, "JPEG", quality=95)
    write_payloads(
        tmp_path / "jpeg",
        [file.getvalue() for file in files],
        suffix="jpg",
        kind="jpeg",
        image_size=None,
        preparation=Preparation(resize="none", crop="none", decoders={}),
    )
    return tmp_path / "jpeg"


def shorter_side_to(image, length):
    width, height = image.size
    shorter = min(width, height)
    return image.resize(
        (round(width * length / shorter), round(height * length / shorter)), BICUBIC
    )


def nearest(pixels):
    """Return the lowest index of the nearest colour, pixel by pixel."""
    centers = PALETTE.centers.astype(np.float64)
    points = pixels.reshape(-1, 3) / 127.5 - 1
    return [int(((centers - point) ** 2).sum(axis=1).argmin()) for point in points]


@pytest.mark.parametrize("draws", [(0, 0, 0), (0.999, 0.999, 0.999), (0.4, 0.3, 0.8)])
def test_augmentation_matches_pillow(images, draws):
    transform = Transform(image_size=32, crop="scaled")
    for image in images:
        scaled = shorter_side_to(image, 256 + int(draws[0] * 129))
        width, height = scaled.size
        top, left = int(draws[1] * (height - 224 + 1)), int(draws[2] * (width - 224 + 1))
        square = scaled.crop((left, top, left + 224, top + 224)).resize((32, 32), BICUBIC)
        got = transform(np.array(image), np.array([0, *draws]))
        assert np.abs(got.astype(int) - np.asarray(square)).max() <= 2


def test_evaluation_crop_matches_pillow(images):
    transform = evaluation_transform(CONFIG)
    for image in images:
        scaled = shorter_side_to(image, 224)
        left, top = (scaled.width - 224) // 2, (scaled.height - 224) // 2
        square = scaled.crop((left, top, left + 224, top + 224)).resize((32, 32), BICUBIC)
        got = transform(np.array(image), transform.draws(np.array([0]))[0])
        assert np.abs(got.astype(int) - np.asarray(square)).max() <= 2


def test_short_side_is_uniform():
    square = np.zeros((10, 10, 3), np.uint8)
    lengths = Counter()
    for draw in (np.arange(12_900) + 0.5) / 12_900:
        part = cut_scaled(square, np.array([draw, 0, 0]), short_sides=(256, 384), size=1)
        lengths[part.base.shape[0]] += 1  # the part is a view of the scaled image
    assert set(lengths.values()) == {100}
    assert sorted(lengths) == [*range(256, 385)]


def test_ids_are_the_nearest_colours(folder):
    transform = training_transform(CONFIG, seed=3)
    pixels, _ = ShardDataset(folder, transform).read(POSITIONS % 4, positions=POSITIONS)
    ids, _ = ShardDataset(folder, transform, palette=PALETTE).read(
        POSITIONS % 4, positions=POSITIONS
    )
    assert ids.dtype == np.uint16
    assert ids.shape == (6, 32 * 32)
    assert ids.ravel().tolist() == nearest(pixels)


def test_manifest_is_that_of_palette_shards(folder):
    dataset = ShardDataset(folder, training_transform(CONFIG, seed=3), palette=PALETTE)
    manifest = dataset.manifest
    assert (manifest.kind, manifest.image_size, manifest.num_tokens) == ("palette", 32, 1024)
    assert (manifest.identity, manifest.vocabulary_size) == (PALETTE.sha256, 40)


def test_crops_depend_on_seed_and_position_only(folder):
    def read(*, seed=3, rank=0, ranks=1, step=0, threads=1):
        dataset = ShardDataset(folder, training_transform(CONFIG, seed=seed), palette=PALETTE)
        loader = BatchLoader(
            dataset,
            seed=0,
            micro_batch_size=4 // ranks,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            accumulation_steps=1,
            start_step=step,
            threads=threads,
        )
        with loader:
            return next(loader).inputs.numpy()

    whole = read()
    parts = [read(rank=rank, ranks=2, threads=3) for rank in range(2)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(np.sort(read(step=1), axis=None), np.sort(whole, axis=None))
    assert not np.array_equal(read(seed=4), whole)


def test_palette_needs_images(folder, tmp_path):
    write_payloads(
        tmp_path / "recordings",
        [bytes(2 * 320)],
        suffix="pcm",
        kind="recordings",
        image_size=None,
        frame_shape=(2, 4),
        preparation=Preparation(resize="none", crop="none", decoders={}),
    )
    with pytest.raises(UserError, match=r"recordings shards.*remove data\.palette"):
        ShardDataset(tmp_path / "recordings", None, palette=PALETTE)
