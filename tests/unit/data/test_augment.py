"""RandAugment against timm's, operation by operation, and as part of a transform."""

import itertools

import numpy as np
import pytest
from PIL import Image
from timm_alone import timm_module

from megavis.config.errors import UserError
from megavis.data.codecs.augment import NUM_AUGMENT_DRAWS, OPERATIONS, RandAugment
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once

NAMES = [
    *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing"),
    *("SolarizeAdd", "ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing"),
    *("SharpnessIncreasing", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
]


def photograph(size=48):
    from skimage.data import astronaut

    return astronaut()[40 : 40 + size, 180 : 180 + size]


def test_operations_match_timm(monkeypatch):
    timm = timm_module("data", "auto_augment")
    assert timm._RAND_INCREASING_TRANSFORMS == NAMES
    picture = Image.fromarray(photograph())
    hparams = {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    changed = 0
    for (name, ours), magnitude, sign in itertools.product(
        zip(NAMES, OPERATIONS, strict=True), (0.0, 3.3, 9.0, 9.9), (1.0, -1.0)
    ):
        monkeypatch.setattr(timm, "_randomly_negate", lambda value, sign=sign: sign * value)
        theirs = timm.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=hparams)
        expected = np.asarray(theirs(picture))
        made = np.asarray(ours(picture, magnitude / 10, sign))
        np.testing.assert_array_equal(made, expected, err_msg=f"{name} {magnitude} {sign}")
        changed += not np.array_equal(made, np.asarray(picture))
    assert changed > 80


def test_draws_select_operation_strength_and_sign():
    image = photograph()
    augment = RandAugment(9, 0.5)
    # Invert (the third of fifteen) and a skipped operation; then a rotation by 30 · 0.9 degrees.
    inverted = 255 - image
    np.testing.assert_array_equal(
        augment(image, np.array([2.5 / 15, 0.4, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5])), inverted
    )
    turned = Image.fromarray(inverted).rotate(
        -27, resample=Image.Resampling.BICUBIC, fillcolor=(124, 116, 104)
    )
    draws = np.array([2.5 / 15, 0.4, 0.5, 0.5, 3.5 / 15, 0.0, 0.5, 0.9])
    np.testing.assert_array_equal(augment(image, draws), np.asarray(turned))


def test_strengths_are_normal_and_bounded():
    draws = (np.arange(20_000) + 0.5) / 20_000
    strengths = np.array([RandAugment(9, 0.5)._strength(draw) for draw in draws])
    # The closed form of E[min(x, 10)] for x ~ N(9, 0.5²).
    density, above = np.exp(-2) / np.sqrt(2 * np.pi), 0.022750131948
    mean = 9 + 0.5 * (2 * above - density)
    assert strengths.mean() == pytest.approx(mean / 10, abs=1e-4)
    assert strengths.max() == 1.0
    assert RandAugment(9, 0.5)._strength(0.0) >= 0.0


def test_augmentation_is_applied_last_and_depends_on_position_only(image_shards):
    plain = {"image_size": 16, "crop": "shifted", "flip": True, "seed": 3}
    augment = RandAugment(9, 0.5)
    with_augment = ShardDataset(image_shards / "train", Transform(**plain, augment=augment))
    without = ShardDataset(image_shards / "train", Transform(**plain))
    positions = np.arange(1000, 1040)
    images, _ = with_augment.read(np.arange(40), positions=positions)
    before, _ = without.read(np.arange(40), positions=positions)
    draws = Transform(**plain, augment=augment).draws(positions)
    expected = [
        augment(image, draw[-NUM_AUGMENT_DRAWS:]) for image, draw in zip(before, draws, strict=True)
    ]
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(
        with_augment.read(np.arange(30, 40), positions=positions[30:])[0], images[30:]
    )
    # Two operations, each applied with probability 1/2, leave a quarter of the images unchanged.
    stay = (images == before).all(axis=(1, 2, 3)).mean()
    assert 0.1 < stay < 0.5


def test_tokens_are_not_augmented(shards):
    with pytest.raises(UserError, match="remove data.rand_augment"):
        ShardDataset(shards / "train", Transform(image_size=8, augment=RandAugment(9, 0.5)))
