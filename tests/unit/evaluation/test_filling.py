"""Scores of filled-in patches, against the definition of PSNR."""

import math

import pytest
import torch

from megavis.evaluation.filling import score_filling


def test_only_hidden_pixels_count():
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


def test_the_perceptual_distance_is_averaged():
    images = torch.zeros(70, 2, 2, 3, dtype=torch.uint8)
    hidden = torch.ones(70, 2, 2, dtype=torch.bool)
    brightness = lambda a, b: (a - b).abs().mean((1, 2, 3))  # noqa: E731
    scores = score_filling(images, images + 51, hidden, perceptual=brightness)
    assert scores["perceptual"] == pytest.approx(0.2)
