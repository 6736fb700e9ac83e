"""SSIM and PSNR against scikit-image."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from megavis.config.errors import UserError
from megavis.evaluation.images.pair_metrics import PairScores

pytestmark = pytest.mark.once


def test_psnr_and_ssim_match_scikit_image():
    random = np.random.default_rng(0)
    first = random.integers(0, 256, (4, 21, 17, 3)).astype(np.uint8)
    noise = random.integers(-60, 61, first.shape)
    second = (first + noise).clip(0, 255).astype(np.uint8)
    scores = PairScores()
    for rows in (slice(0, 3), slice(3, 4)):
        scores.add(torch.from_numpy(first[rows]), torch.from_numpy(second[rows]))
    pairs = list(zip(first, second, strict=True))
    # The 11×11 Gaussian window of Wang et al. (2004).
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    similarities = [structural_similarity(*p, channel_axis=-1, **options) for p in pairs]
    assert scores.means()["ssim"] == pytest.approx(np.mean(similarities), rel=1e-9)
    noises = [peak_signal_noise_ratio(*pair) for pair in pairs]
    assert scores.means()["psnr"] == pytest.approx(np.mean(noises), rel=1e-9)


def test_identical_images_are_left_out_of_the_mean_psnr():
    """Their PSNR is infinite: one of them would be the mean of all."""
    images = torch.arange(2 * 16 * 16 * 3, dtype=torch.uint8).reshape(2, 16, 16, 3)
    scores = PairScores()
    scores.add(images, torch.stack([images[0], images[1] ^ 4]))
    # Each value differs by 4.
    assert scores.means()["psnr"] == pytest.approx(20 * math.log10(255 / 4))
    assert scores.num_identical == 1


def test_images_smaller_than_the_window_raise():
    with pytest.raises(UserError, match="at least 11² pixels; these have 8×16"):
        PairScores().add(*torch.zeros(2, 1, 8, 16, 3, dtype=torch.uint8))
