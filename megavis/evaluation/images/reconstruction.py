"""Reconstruction error of a tokenizer.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import MANIFEST_NAME
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.images.completions import signal_to_noise
from megavis.evaluation.images.feature_networks import FeatureNetwork
from megavis.evaluation.images.generation import FeatureCollector, ImageSetComparison, compare
from megavis.model.autoencoder_losses import PerceptualDistance
from megavis.model.inference import Inference

_BATCH_SIZE = 64
WINDOW = 11
_SIGMA = 1.5
_RANGE = 255.0
_C1, _C2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2
"""Of SSIM: window and standard deviation in pixels, range of values, and constants."""


def reconstructions(
    runner: Inference, objective: Trainable, dataset: ShardDataset, *, num_images: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first images and their reconstructions, uint8 `[b, H, W, 3]` each.

    Reconstruction is deterministic: a VAE decodes the posterior mean.
    """
    batches = evaluation_batches(
        dataset,
        batch_size=_BATCH_SIZE,
        limit=num_images,
    )
    for batch in batches:
        originals = batch.inputs.to(runner.context.device)
        made = objective.reconstruction(runner.predictions(objective.inputs_from(originals)))
        yield objective.shown(originals), made


class PairScores:
    """Mean scores of pairs of images and reconstructions.

    Args:
        perceptual: a perceptual distance to measure too.
    """

    def __init__(self, perceptual: PerceptualDistance | None = None) -> None:
        self._perceptual = perceptual
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, originals: Tensor, made: Tensor) -> None:
        """Add pairs of images uint8 `[b, H, W, 3]`.

        Raises:
            UserError: they are too small for a metric.
        """
        scores = {
            "psnr": signal_to_noise(made, originals),
            "ssim": structural_similarity(made, originals),
        }
        if self._perceptual is not None:
            pixels = (x.permute(0, 3, 1, 2).float() / 255.0 for x in (made, originals))
            with torch.no_grad():
                scores[self._perceptual.name] = self._perceptual(*pixels)
        for name, values in scores.items():
            self._values[name] += values.tolist()

    def means(self) -> dict[str, float]:
        """Return `psnr` in dB, `ssim`, and the perceptual distance by its name."""
        return {name: fmean(values) for name, values in self._values.items()}


class Distances:
    """Fréchet distance between reconstructions and originals.

    Args:
        network: feature network.
        num_images: number of pairs to come.

    Raises:
        UserError: there are fewer than 2 pairs.
    """

    def __init__(self, network: FeatureNetwork, *, num_images: int) -> None:
        # Precision and recall are not computed for reconstructions.
        self._originals, self._made = (
            FeatureCollector(network, num_images=num_images, num_kept=0) for _ in range(2)
        )

    def add(self, originals: Tensor, made: Tensor) -> None:
        """Add pairs of images uint8 `[b, H, W, 3]`."""
        self._originals.add(originals)
        self._made.add(made)

    def result(self, *, run: Path, originals: Path) -> ImageSetComparison:
        """Return the comparison; `originals` is the shard folder of the originals."""
        digest = sha256_of_file(originals / MANIFEST_NAME)
        return compare(
            self._made.summary(source=f"{originals} through {run}", sha256=digest),
            self._originals.summary(source=str(originals), sha256=digest),
            device=torch.device("cpu"),
        )


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return the SSIM of each pair of images, averaged over full windows.

    Args:
        first: 0 to 255, `[b, H, W, 3]`.
        second: likewise.

    Returns:
        float64 `[b]`, at most 1.

    Raises:
        UserError: the images are smaller than a window.
    """
    if min(first.shape[1:3]) < WINDOW:
        size = "×".join(map(str, first.shape[1:3]))
        raise UserError(f"SSIM needs images of at least {WINDOW}² pixels; these have {size}")
    x, y = (images.double().movedim(3, 1) for images in (first, second))
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = _windows(torch.stack([x, y, x * x, y * y, x * y]))
    variances = mean_xx - mean_x**2 + mean_yy - mean_y**2
    covariance = mean_xy - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (likeness / ((mean_x**2 + mean_y**2 + _C1) * (variances + _C2))).flatten(1).mean(1)


def _windows(planes: Tensor) -> Tensor:
    """Return the weighted mean of every window: `[..., H, W]` to `[..., H - 10, W - 10]`."""
    places = torch.arange(WINDOW, device=planes.device, dtype=planes.dtype) - WINDOW // 2
    weights = torch.exp(-0.5 * (places / _SIGMA) ** 2)
    weights = weights / weights.sum()
    flat = planes.reshape(-1, 1, *planes.shape[-2:])
    means = F.conv2d(F.conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return means.view(*planes.shape[:-2], *means.shape[-2:])
