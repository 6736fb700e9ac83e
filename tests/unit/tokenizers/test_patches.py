"""Patchify against plain loops, and patch statistics against NumPy."""

import numpy as np
import pytest
import torch

from megavis.tokenizers.patches import (
    normalize_patches,
    patchify,
    standardize,
    to_uint8,
    unpatchify,
)


def draw(*shape):
    random = np.random.default_rng(0)
    return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8))


def test_patchify_matches_plain_loops():
    images = draw(2, 6, 9, 3)
    patches = patchify(images, 3)
    assert patches.shape == (2, 6, 27)
    for b in range(2):
        for row in range(2):
            for column in range(3):
                expected = [
                    images[b, 3 * row + y, 3 * column + x, channel]
                    for y in range(3)
                    for x in range(3)
                    for channel in range(3)
                ]
                assert patches[b, 3 * row + column].tolist() == expected
    square = images[:, :, :6]
    assert torch.equal(unpatchify(patchify(square, 3), 3), square)


def test_indivisible_sizes_raise():
    with pytest.raises(ValueError, match="patches of 4 do not divide images of 6 × 8"):
        patchify(draw(1, 6, 8, 3), 4)


def test_standardize_round_trips_to_uint8():
    images = draw(3, 8, 8, 3)
    standard = standardize(images)
    expected = (images[0, 0, 0].numpy() / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(standard[0, 0, 0], expected, rtol=1e-5)
    assert torch.equal(to_uint8(standard), images)


def test_normalize_patches_matches_numpy():
    patches = patchify(standardize(draw(2, 8, 8, 3)), 4)
    normal, plain = normalize_patches(patches), patches.double().numpy()
    expected = (plain - plain.mean(-1, keepdims=True)) / np.sqrt(
        plain.var(-1, ddof=1, keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(normal, expected, rtol=1e-4, atol=1e-5)
    # A constant patch has zero variance and must stay finite.
    assert normalize_patches(torch.ones(1, 1, 12)).abs().max() == 0
