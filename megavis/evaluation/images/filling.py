"""Quality of predicted patches: signal-to-noise ratio and a perceptual distance."""

from __future__ import annotations

import torch
from torch import Tensor

from megavis.evaluation.images.completions import signal_to_noise
from megavis.model.perceptual import PerceptualDistance

_BATCH_SIZE = 64


def score_filling(
    originals: Tensor, made: Tensor, hidden: Tensor, *, perceptual: PerceptualDistance | None = None
) -> dict[str, float]:
    """Compare images of which a part was predicted with what they were.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        made: likewise; what was given is as it was.
        hidden: bool `[b, h, w]`, the pixels that were predicted.
        perceptual: the distance to measure besides.

    Returns:
        `psnr`: dB, of the hidden pixels of all images together; `psnr_of_images`: of all pixels of
        each image, the mean over the images; `lpips_alexnet` or as the distance is named: its mean.
    """
    scores = {
        "psnr": float(signal_to_noise(made[hidden][None], originals[hidden][None])),
        "psnr_of_images": float(signal_to_noise(made, originals).mean()),
    }
    if perceptual is not None:
        pairs = zip(made.split(_BATCH_SIZE), originals.split(_BATCH_SIZE), strict=True)
        distances = torch.cat([perceptual(_pixels(a), _pixels(b)) for a, b in pairs])
        scores[perceptual.name] = float(distances.mean())
    return scores


def _pixels(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 255.0
