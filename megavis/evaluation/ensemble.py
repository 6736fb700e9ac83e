"""Ensemble of fine-tuned networks: the mean of their class probabilities.

Networks that were pre-trained in different ways err on different images. Who found that:
docs/evaluation.md.

Legend: m networks, b images, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.composition.classification import Classification, is_among_likeliest
from megavis.data.loading.loader import Readable, evaluation_batches
from megavis.evaluation.classes import class_logits
from megavis.model.inference import Inference

_BATCH_SIZE = 64


@dataclass(frozen=True)
class ClassProbabilities:
    """What a network, or several, makes of labelled images.

    Attributes:
        probabilities: float64 `[b, c]`.
        labels: int64 `[b]`.
    """

    probabilities: Tensor
    labels: Tensor

    def share_right(self, count: int) -> float:
        """Return the share of images whose class is among so many likeliest, in [0, 1]."""
        return float(is_among_likeliest(self.probabilities, self.labels, count).double().mean())


@torch.no_grad()
def predict_classes(
    runner: Inference, objective: Classification, dataset: Readable
) -> ClassProbabilities:
    """Let one network say how likely each class is, for every image; on one process."""
    probabilities, labels = [], []
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE):
        labels.append(batch.labels)
        batch = batch.to(runner.context.device)
        logits = class_logits(runner, objective, batch)
        probabilities.append(logits.double().softmax(-1).cpu())
    return ClassProbabilities(torch.cat(probabilities), torch.cat(labels))


def average(members: Sequence[ClassProbabilities]) -> ClassProbabilities:
    """Return the mean of the probabilities of m networks.

    Raises:
        ValueError: their images have not the same labels.
    """
    first = members[0]
    if any(not torch.equal(first.labels, member.labels) for member in members):
        raise ValueError("the networks were asked about different images")
    stacked = torch.stack([member.probabilities for member in members])
    return ClassProbabilities(stacked.mean(0), first.labels)
