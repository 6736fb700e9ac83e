"""Classify by nearest neighbours among the features of each layer.

For the source of this evaluation, see docs/evaluation.md. It does not specify the vote; here
features are centered and compared by cosine similarity, each of the k nearest neighbours has one
vote, and ties go to the class of the nearest.

Legend: t training images, v validation images, h hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.figures import plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NeighborAccuracy:
    """Accuracies of one layer, in [0, 1]; layer 0 is the input of the first block."""

    layer: int
    trained: float
    untrained: float


def neighbor_accuracy(
    train: Tensor, train_labels: np.ndarray, held_out: Tensor, labels: np.ndarray, *, k: int
) -> float:
    """Return the accuracy of the neighbours' vote, from `[t, h]` for `[v, h]`."""
    center = train.mean(0)
    known, asked = F.normalize(train - center, dim=1), F.normalize(held_out - center, dim=1)
    nearest = (asked @ known.t()).topk(min(k, len(known)), dim=1).indices
    classes = torch.from_numpy(train_labels)[nearest]
    votes = F.one_hot(classes, int(train_labels.max()) + 1).sum(1).double()
    # Half a vote more for the nearest only breaks ties.
    votes.scatter_add_(1, classes[:, :1], torch.full((len(votes), 1), 0.5, dtype=torch.float64))
    return float((votes.argmax(1) == torch.from_numpy(labels)).float().mean())


def accuracy_by_layer(
    train: LabelledFeatures, held_out: LabelledFeatures, *, k: int
) -> list[float]:
    """Return `neighbor_accuracy` of each layer. Raises UserError: a set has no labels."""
    if not (len(train.labels) and len(held_out.labels)):
        raise UserError("nearest neighbours need labelled images, and there are none")
    return [
        neighbor_accuracy(
            torch.from_numpy(known), train.labels, torch.from_numpy(asked), held_out.labels, k=k
        )
        for known, asked in zip(train.layers, held_out.layers, strict=True)
    ]


def draw_neighbors(scores: Sequence[NeighborAccuracy], *, name: str, k: int) -> Figure:
    """Draw accuracy by layer."""
    figure, axes = plain_axes("layer", f"accuracy of {k} nearest neighbours (%)")
    axes.locator_params("x", integer=True)
    layers = [score.layer for score in scores]
    axes.plot(layers, [100 * s.trained for s in scores], "o-", color="#1f5fa8", label=name)
    axes.plot(layers, [100 * s.untrained for s in scores], "o-", color="#8a8a8a", label="untrained")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure
