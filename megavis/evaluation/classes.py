"""Accuracy of classification: fine-tuned networks, ensembles, nearest neighbours, generated images.

An ensemble averages class probabilities; networks with different pre-training make different
errors. Nearest neighbours are found among the features of each layer. For the sources of these
evaluations, see docs/evaluation.md. They do not specify the neighbours' vote; here features are
centered and compared by cosine similarity, each of the k nearest neighbours has one vote, and of
classes with equally many the one with the nearest wins. A small classifier scores
class-conditional samples; it is fitted only on labelled images, independently of the generative
models.

Legend: m networks, b images (N of a set), c classes, t training images, v validation images,
h hidden size, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.classification import Classification, is_among_likeliest
from megavis.config.errors import UserError
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import Batch, evaluation_batches
from megavis.evaluation.features import LabelledFeatures, view_of
from megavis.evaluation.figures import legend_below, plain_axes
from megavis.evaluation.images.results import NamedRight
from megavis.evaluation.linear import majority_vote
from megavis.evaluation.results import ClassAccuracy
from megavis.model.inference import Inference
from megavis.parallel.random import derive_seed, seeded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BATCH_SIZE = 64
_WIDTHS, _GRID, _LEARNING_RATE = (24, 48, 96), 4, 3e-3
"""Channels, side of the last grid, and learning rate of the classifier of generated images."""


@torch.no_grad()
def evaluate_classifier(
    inference: Inference,
    objective: Classification,
    dataset: Samples,
    *,
    num_views: int = 1,
    batch_size: int = 64,
) -> ClassAccuracy:
    """Classify labelled images with a fine-tuned network.

    Collective over all processes of the job, whose data-parallel ranks divide the images.
    """
    context, num_classes = inference.context, objective.settings.num_classes
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
        logits = [class_logits(inference, objective, view) for view in views]
        if batch.is_repeated:
            continue
        counts[0] += is_among_likeliest(logits[0], batch.labels, 1).sum()
        counts[1] += is_among_likeliest(logits[0], batch.labels, 5).sum()
        answers = majority_vote(torch.stack([view.argmax(1) for view in logits]).cpu().numpy())
        cells = batch.labels * num_classes + torch.from_numpy(answers).to(context.device)
        counts[2:] += torch.bincount(cells, minlength=num_classes**2)
    dist.all_reduce(counts, group=context.data.group)
    top1, top5 = counts[:2].tolist()
    confusion = counts[2:].view(num_classes, num_classes)
    num_images = int(confusion.sum())
    return ClassAccuracy(
        num_images=num_images,
        top1=top1 / num_images,
        top5=top5 / num_images,
        num_views=num_views,
        vote=int(confusion.trace()) / num_images,
        confusion=tuple(map(tuple, confusion.tolist())),
    )


@torch.no_grad()
def class_logits(inference: Inference, objective: Classification, batch: Batch) -> Tensor:
    """Return a fine-tuned network's logits `[b, c]`; labels are not passed to it."""
    predictions = inference.predictions(objective.sequence(batch).inputs)
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
    inference: Inference, objective: Classification, dataset: Samples
) -> ClassProbabilities:
    """Predict the class probabilities of all images with one network, on one process."""
    probabilities, labels = [], []
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE):
        labels.append(batch.labels)
        batch = batch.to(inference.context.device)
        logits = class_logits(inference, objective, batch)
        probabilities.append(logits.double().softmax(-1).cpu())
    return ClassProbabilities(torch.cat(probabilities), torch.cat(labels))


def average(members: Sequence[ClassProbabilities]) -> ClassProbabilities:
    """Return the mean of the probabilities of m networks. Raises ValueError: labels differ."""
    first = members[0]
    if any(not torch.equal(first.labels, member.labels) for member in members):
        raise ValueError("the networks were evaluated on different images")
    stacked = torch.stack([member.probabilities for member in members])
    return ClassProbabilities(stacked.mean(0), first.labels)


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
    # Half an extra vote for the nearest, a quarter for the next ...: they only break ties.
    weights = 1 + 0.5 ** torch.arange(1, nearest.shape[1] + 1, dtype=torch.float64)
    votes = torch.zeros(len(classes), int(train_labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, classes, weights.expand_as(classes))
    return float((votes.argmax(1) == torch.from_numpy(labels)).double().mean())


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


def plot_neighbors(scores: Sequence[NeighborAccuracy], *, name: str, k: int) -> Figure:
    """Plot accuracy by layer."""
    figure, axes = plain_axes("layer", f"accuracy of {k} nearest neighbours (%)")
    axes.locator_params("x", integer=True)
    layers = [score.layer for score in scores]
    axes.plot(layers, [100 * s.trained for s in scores], "o-", color="#1f5fa8", label=name)
    axes.plot(layers, [100 * s.untrained for s in scores], "o-", color="#8a8a8a", label="untrained")
    legend_below(figure)
    return figure


class ImageClassifier(nn.Module):
    """Three convolutions with stride 2, and a linear layer on the remaining 4² positions."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *_WIDTHS), _WIDTHS, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        pooled = [nn.AdaptiveAvgPool2d(_GRID), nn.Flatten()]
        self.network = nn.Sequential(
            *layers, *pooled, nn.Linear(_WIDTHS[-1] * _GRID**2, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images uint8 `[b, H, W, 3]` to logits `[b, c]`."""
        return self.network(images.permute(0, 3, 1, 2).float() / 127.5 - 1)


def fit_classifier(
    images: Tensor, labels: Tensor, *, num_classes: int, epochs: int, seed: int
) -> ImageClassifier:
    """Fit a classifier by Adam with a decaying learning rate; deterministic on a CPU.

    Images uint8 `[N, H, W, 3]` are on the compute device; labels int64 `[N]` are below c.
    """
    with seeded(seed, "classifier"):
        classifier = ImageClassifier(num_classes).to(images.device)
    random = torch.Generator().manual_seed(derive_seed(seed, "classifier order") >> 1)
    batches = [
        batch
        for _ in range(epochs)
        for batch in torch.randperm(len(images), generator=random).split(_BATCH_SIZE)
    ]
    optimizer = torch.optim.Adam(classifier.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        chosen = batch.to(images.device)
        loss = F.cross_entropy(classifier(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return classifier.eval().requires_grad_(False)


def classify_images(classifier: ImageClassifier, images: Tensor) -> Tensor:
    """Predict the class of each image uint8 `[N, H, W, 3]`: int64 `[N]`."""
    return torch.cat([classifier(batch).argmax(1) for batch in images.split(_BATCH_SIZE)])


def class_accuracies(
    classifier: ImageClassifier, images: Tensor, labels: Tensor, class_names: Sequence[str]
) -> NamedRight:
    """Return the classifier's accuracy on images uint8 `[N, H, W, 3]` with labels int64 `[N]`."""
    right = classify_images(classifier, images) == labels
    shares = {
        name: right[labels == label].double().mean().item()
        for label, name in enumerate(class_names)
        if (labels == label).any()
    }
    return NamedRight(len(images), right.double().mean().item(), shares)
