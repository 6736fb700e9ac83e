"""Accuracy and confusion matrix of fine-tuned networks and their ensembles.

An ensemble averages class probabilities; networks with different pre-training make different
errors. For the source of this result, see docs/evaluation.md.

Legend: m networks, b images, c classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavis.composition.classification import Classification, is_among_likeliest
from megavis.data.format.files import write_json
from megavis.data.loading.batch import Batch
from megavis.data.loading.loader import Readable, evaluation_batches
from megavis.evaluation.features import view_of
from megavis.evaluation.linear import majority_vote
from megavis.model.inference import Inference

_BATCH_SIZE = 64


@dataclass(frozen=True)
class ClassResult:
    """Accuracy on a set of labelled images.

    Attributes:
        top1: fraction of images whose most likely class is correct, in [0, 1].
        top5: fraction whose class is among the five most likely (or all, if there are fewer).
        num_views: random draws of each image's inputs, such as BERT's masks.
        vote: fraction of images whose majority vote over views is correct; top1 for one view.
        confusion: int64 `[c, c]`: images of each class (row) by predicted class (column).
    """

    num_images: int
    top1: float
    top5: float
    num_views: int
    vote: float
    confusion: np.ndarray

    def write(self, path: Path, *, class_names: Sequence[str], **record: Any) -> None:
        """Write the result and further fields as JSON, atomically."""
        content = {**record, **dataclasses.asdict(self), "class_names": list(class_names)}
        write_json(path, {**content, "confusion": self.confusion.tolist()})


@torch.no_grad()
def evaluate_classifier(
    runner: Inference,
    objective: Classification,
    dataset: Readable,
    *,
    num_views: int = 1,
    batch_size: int = 64,
) -> ClassResult:
    """Classify labelled images with a fine-tuned network.

    Collective over all processes of the job. Data-parallel ranks divide the images; fewer than one
    per rank are left out at the end.
    """
    context, num_classes = runner.context, objective.settings.num_classes
    # Top-1 and top-5 counts, then the rows of the confusion matrix.
    counts = torch.zeros(2 + num_classes**2, dtype=torch.int64, device=context.device)
    for batch in evaluation_batches(
        dataset,
        batch_size=batch_size,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    ):
        batch = batch.to(context.device)
        views = [view_of(batch, number, dataset) for number in range(num_views)]
        logits = [class_logits(runner, objective, view) for view in views]
        counts[0] += is_among_likeliest(logits[0], batch.labels, 1).sum()
        counts[1] += is_among_likeliest(logits[0], batch.labels, 5).sum()
        answers = majority_vote(torch.stack([view.argmax(1) for view in logits]).cpu().numpy())
        cells = batch.labels * num_classes + torch.from_numpy(answers).to(context.device)
        counts[2:] += torch.bincount(cells, minlength=num_classes**2)
    dist.all_reduce(counts, group=context.data.group)
    top1, top5 = counts[:2].tolist()
    confusion = counts[2:].view(num_classes, num_classes).cpu().numpy()
    num_images = int(confusion.sum())
    return ClassResult(
        num_images=num_images,
        top1=top1 / num_images,
        top5=top5 / num_images,
        num_views=num_views,
        vote=float(confusion.trace() / num_images),
        confusion=confusion,
    )


@torch.no_grad()
def class_logits(runner: Inference, objective: Classification, batch: Batch) -> Tensor:
    """Return a fine-tuned network's logits `[b, c]`; labels are not passed to it."""
    predictions = runner.predictions(objective.sequence(batch).inputs)
    return objective.outputs(predictions)


@dataclass(frozen=True)
class ClassProbabilities:
    """Class probabilities of labelled images, from one network or an ensemble.

    Attributes:
        probabilities: float64 `[b, c]`.
    """

    probabilities: Tensor
    labels: Tensor

    def top_k_accuracy(self, count: int) -> float:
        """Return the top-`count` accuracy in [0, 1]."""
        return float(is_among_likeliest(self.probabilities, self.labels, count).double().mean())


@torch.no_grad()
def predict_classes(
    runner: Inference, objective: Classification, dataset: Readable
) -> ClassProbabilities:
    """Predict the class probabilities of all images with one network, on one process."""
    probabilities, labels = [], []
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE):
        labels.append(batch.labels)
        batch = batch.to(runner.context.device)
        logits = class_logits(runner, objective, batch)
        probabilities.append(logits.double().softmax(-1).cpu())
    return ClassProbabilities(torch.cat(probabilities), torch.cat(labels))


def average(members: Sequence[ClassProbabilities]) -> ClassProbabilities:
    """Return the mean of the probabilities of m networks. Raises ValueError: labels differ."""
    first = members[0]
    if any(not torch.equal(first.labels, member.labels) for member in members):
        raise ValueError("the networks were evaluated on different images")
    stacked = torch.stack([member.probabilities for member in members])
    return ClassProbabilities(stacked.mean(0), first.labels)
