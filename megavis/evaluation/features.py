"""Features of a data set: one vector an image and layer, and the raw pixels to compare with.

Legend: b images, n tokens of an image, L blocks, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megavis.data.batch import Batch
from megavis.data.dataset import ShardDataset
from megavis.data.loader import evaluation_batches
from megavis.model.runner import Runner
from megavis.objectives.base import Objective
from megavis.tokenizers.palette import Palette


@dataclass(frozen=True)
class LabelledFeatures:
    """What a linear classifier sees.

    Attributes:
        layers: float32 `[layers, b, width]`.
        labels: int64 `[b]`, each 0 or more.
    """

    layers: np.ndarray
    labels: np.ndarray


def layer_features(
    runner: Runner,
    objective: Objective,
    dataset: ShardDataset,
    *,
    limit: int | None = None,
    batch_size: int = 64,
) -> LabelledFeatures:
    """Return f^l = mean over tokens of n^l for l = 0 .. L (iGPT, section 2.4).

    A BERT model's inputs are masked as in training, each image by a mask of its own, "to keep
    inputs in-distribution" (section 4.6).

    Args:
        runner: the model.
        objective: the paper.
        dataset: images; those without a label are left out.
        limit: only the first so many.
        batch_size: images of one forward pass.

    Returns:
        `layers` is `[L + 1, b, h]`.
    """
    features, labels = [], []
    for batch in _batches(dataset, limit=limit, batch_size=batch_size):
        batch = batch.to(runner.context.device)
        features.append(runner.features(objective.sequence(batch).inputs).cpu())
        labels.append(batch.labels.cpu())
    return _labelled(torch.cat(features, dim=1).numpy(), torch.cat(labels).numpy())


def pixel_features(
    dataset: ShardDataset, *, palette: Palette, limit: int | None = None, batch_size: int = 1024
) -> LabelledFeatures:
    """Return the colours that the tokens stand for, in [-1, 1]; `layers` is `[1, b, 3 · n]`.

    These are the very pixels that the model sees, after resize and palette.
    """
    pixels, labels = [], []
    for batch in _batches(dataset, limit=limit, batch_size=batch_size):
        pixels.append(palette.centers[batch.inputs.numpy()].reshape(len(batch), -1))
        labels.append(batch.labels.numpy())
    return _labelled(np.concatenate(pixels)[None], np.concatenate(labels))


def _batches(dataset: ShardDataset, *, limit: int | None, batch_size: int) -> Iterator[Batch]:
    return evaluation_batches(
        dataset, batch_size=batch_size, data_parallel_rank=0, data_parallel_size=1, limit=limit
    )


def _labelled(layers: np.ndarray, labels: np.ndarray) -> LabelledFeatures:
    kept = labels >= 0
    return LabelledFeatures(layers[:, kept], labels[kept])
