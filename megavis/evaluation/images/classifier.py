"""A small image classifier to score class-conditional samples.

It is fitted on labelled images only, independently of the generative models.

Legend: N images, b per batch, H and W pixels, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.parallel.random import derive_seed, seeded

_WIDTHS = (24, 48, 96)
_GRID = 4
_BATCH_SIZE = 64
_LEARNING_RATE = 3e-3


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
) -> dict[str, Any]:
    """Return the classifier's accuracy on images uint8 `[N, H, W, 3]` with labels int64 `[N]`.

    Returns:
        `images`, their number; `all`, the accuracy on all images; and `classes`, the accuracy on
        each class that occurs, by name.
    """
    right = classify_images(classifier, images) == labels
    shares = {
        name: right[labels == label].float().mean().item()
        for label, name in enumerate(class_names)
        if (labels == label).any()
    }
    return {"images": len(images), "all": right.float().mean().item(), "classes": shares}
