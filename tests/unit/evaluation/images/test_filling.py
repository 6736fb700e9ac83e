"""Scores of completed images against the definition of PSNR and scikit-image."""

import math

import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio

from megavis.evaluation.images.pair_metrics import score_filling

pytestmark = pytest.mark.once


def test_psnr_uses_only_hidden_pixels():
    torch.manual_seed(0)
    originals = torch.randint(256, (3, 4, 4, 3), dtype=torch.uint8)
    hidden = torch.rand(3, 4, 4) < 0.5
    made = torch.where(hidden[..., None], torch.randint_like(originals, 256), originals)
    scores = score_filling(originals, made, hidden)
    square, count = 0.0, 0
    for pixel in hidden.nonzero().tolist():
        b, i, j = pixel
        for channel in range(3):
            square += (int(made[b, i, j, channel]) - int(originals[b, i, j, channel])) ** 2
            count += 1
    assert scores["psnr"] == pytest.approx(10 * math.log10(255**2 * count / square))


def test_psnr_of_images_matches_scikit_image():
    torch.manual_seed(0)
    originals, made = torch.randint(256, (2, 5, 8, 8, 3), dtype=torch.uint8)
    scores = score_filling(originals, made, torch.ones(5, 8, 8, dtype=torch.bool))
    theirs = [
        peak_signal_noise_ratio(a.numpy(), b.numpy()) for a, b in zip(originals, made, strict=True)
    ]
    assert scores["psnr_of_images"] == pytest.approx(sum(theirs) / len(theirs), rel=1e-5)


def test_perceptual_distance_is_averaged():
    images = torch.zeros(70, 2, 2, 3, dtype=torch.uint8)
    hidden = torch.ones(70, 2, 2, dtype=torch.bool)

    class Brightness:
        name = "brightness"

        def __call__(self, one, other):
            return (one - other).abs().mean((1, 2, 3))

    scores = score_filling(images, images + 51, hidden, perceptual=Brightness())
    assert scores["brightness"] == pytest.approx(0.2)
