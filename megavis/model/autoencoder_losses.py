"""Perceptual and adversarial losses of autoencoders.

Perceptual distance in the features of VGG-16 or AlexNet: "The Unreasonable Effectiveness of Deep
Features as a Perceptual Metric" (Zhang et al., 2018), equation 1. Features after five ReLUs are
normalised over channels; their squared differences, weighted by w, are summed over channels,
averaged over positions and summed over the five levels. With w = 1 it trains tokenizers; with the
published w it is the metric LPIPS ("lin", version 0.1). The user provides all weights as files;
they are constants, not part of the trained network or its checkpoints.

The discriminator is a residual network after StyleGAN2's (Karras et al., 2020), with average
pooling instead of blurring. Its losses are the non-saturating ones of "Generative Adversarial Nets"
(2014) with the R1 penalty of "Which Training Methods for GANs do actually Converge?" (equation 9).

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megavis.config.errors import UserError
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN

_PARTS = ("weight", "bias")
_PADDING = {3: 1, 5: 2, 11: 2}  # by kernel size
_SLOPE, _SMALLEST_SIDE, _LARGEST_MULTIPLE = 0.2, 4, 8
"""The discriminator's slope of leaky ReLU, side of the last grid, and largest number of channels as
a multiple of `filters`."""


class PerceptualDistance:
    """Perceptual distance of two images, with constant weights.

    Args:
        weights: state dict of a VGG-16 or an AlexNet (`features.0.weight`, ...).
        linear: w of each level, as `lin0.model.1.weight` `[1, channels, 1, 1]` and so on, as in
            the package lpips; None for w = 1.

    Raises:
        UserError: a tensor is missing, or has the wrong shape.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], linear: Mapping[str, Tensor] | None = None
    ) -> None:
        self.backbone = _backbone_of(weights)
        self._weights = {name: weights[name].float() for name in self.backbone.names}
        # In [0, 1], ImageNet's statistics are the shift and scale of lpips, which it applies in
        # [-1, 1].
        self._mean, self._deviation = (
            torch.tensor(values)[:, None, None] for values in (CHANNEL_MEAN, CHANNEL_DEVIATION)
        )
        self._linear: list[Tensor] | None = None
        if linear is not None:
            self._linear = [
                _linear_of(linear, number, width).float()
                for number, width in enumerate(self.backbone.widths)
            ]

    @property
    def name(self) -> str:
        """Name of the metric, such as `lpips_alexnet`; values depend on the network."""
        kind = "perceptual" if self._linear is None else "lpips"
        return f"{kind}_{self.backbone.name.lower().replace('-', '')}"

    @classmethod
    def load(cls, path: str | Path, linear: str | Path | None = None) -> PerceptualDistance:
        """Read `.safetensors` or `.pth` files of plain tensors; raise UserError for others."""
        weights = read_weights_file(path)
        given = None if linear is None else read_weights_file(linear)
        try:
            return cls(weights, given)
        except UserError as error:
            files = str(path) if linear is None else f"{path}, {linear}"
            raise UserError(f"{files}: {error}") from None

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the distance `[b]` of `[b, 3, H, W]` in [0, 1]. Raises UserError if small."""
        smallest = self.backbone.smallest
        if min(first.shape[2:]) < smallest:
            size = "×".join(map(str, first.shape[2:]))
            raise UserError(
                f"the perceptual distance of {self.backbone.name} needs images of at least"
                f" {smallest} pixels on each side, not {size}"
            )
        self._move(first.device)
        distance = torch.zeros(len(first), device=first.device)
        # Two passes rather than one batch, whose backward pass would include constant images.
        pair = [(images.float() - self._mean) / self._deviation for images in (first, second)]
        for number in range(len(self.backbone.levels)):
            pair = [self._level(number, x) for x in pair]
            # lpips adds 1e-10 to the norm, and torch takes the maximum: equal except for blank
            # features.
            ours, theirs = (F.normalize(x, dim=1, eps=1e-10) for x in pair)
            squares = (ours - theirs).square()
            if self._linear is not None:
                squares = self._linear[number] * squares
            distance = distance + squares.sum(1).mean((1, 2))
        return distance

    def _level(self, number: int, x: Tensor) -> Tensor:
        """Map the features of the previous level to level `number`'s."""
        network = self.backbone
        if number in network.pooled:
            x = F.max_pool2d(x, network.pool, stride=2)
        for layer in network.levels[number]:
            weight, bias = (self._weights[f"features.{layer}.{part}"] for part in _PARTS)
            stride = 1 if layer else network.stride
            x = F.relu(F.conv2d(x, weight, bias, stride=stride, padding=_PADDING[weight.shape[-1]]))
        return x

    def _move(self, device: torch.device) -> None:
        """Move all constants to a device, if they are not there yet."""
        if next(iter(self._weights.values())).device == device:
            return
        self._weights = {name: w.to(device) for name, w in self._weights.items()}
        self._mean, self._deviation = self._mean.to(device), self._deviation.to(device)
        if self._linear is not None:
            self._linear = [w.to(device) for w in self._linear]


@dataclass(frozen=True)
class PerceptualBackbone:
    """A network of convolutions, each followed by a ReLU.

    Attributes:
        levels: indices of the convolutions in torchvision's `features`, by level; the features of a
            level are those after its last convolution.
        widths: output channels of each level.
        kernel: kernel size of the first convolution, which identifies the network's weights.
        stride: stride of the first convolution; it is 1 for all others.
        pool: kernel size of the max pooling, of stride 2, before the levels in `pooled`.
        pooled: indices of levels.
        smallest: smallest supported image side in pixels.
    """

    name: str
    levels: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    kernel: int
    stride: int
    pool: int
    pooled: tuple[int, ...]
    smallest: int

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [f"features.{n}.{part}" for level in self.levels for n in level for part in _PARTS]


BACKBONES = (
    # "Very Deep Convolutional Networks", configuration D.
    PerceptualBackbone(
        name="VGG-16",
        levels=((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)),
        widths=(64, 128, 256, 512, 512),
        kernel=3,
        stride=1,
        pool=2,
        pooled=(1, 2, 3, 4),
        # Four poolings leave one cell.
        smallest=16,
    ),
    # "One weird trick for parallelizing convolutional neural networks".
    PerceptualBackbone(
        name="AlexNet",
        levels=((0,), (3,), (6,), (8,), (10,)),
        widths=(64, 192, 384, 256, 256),
        kernel=11,
        stride=4,
        pool=3,
        pooled=(1, 2),
        # With fewer pixels, the second pooling's input would be smaller than its 3 × 3 window.
        smallest=31,
    ),
)


def _backbone_of(weights: Mapping[str, Tensor]) -> PerceptualBackbone:
    first = weights.get("features.0.weight")
    kernel = 0 if first is None else first.shape[-1]
    network = next((each for each in BACKBONES if each.kernel == kernel), BACKBONES[0])
    for name in network.names:
        if name not in weights:
            raise UserError(f"the {network.name} weights have no {name}; use torchvision's names")
    return network


def _linear_of(linear: Mapping[str, Tensor], number: int, width: int) -> Tensor:
    name = f"lin{number}.model.1.weight"
    given = None if name not in linear else list(linear[name].shape)
    wanted = [1, width, 1, 1]
    if given != wanted:
        found = "missing" if given is None else f"of shape {given}"
        raise UserError(f"{name} of the linear weights is {found}; the network needs {wanted}")
    return linear[name]


def open_perceptual(weights: str | None, lpips_weights: str | None) -> PerceptualDistance | None:
    """Open the distance of `add_perceptual_arguments`, if any. Raises UserError."""
    if weights is None:
        if lpips_weights:
            raise UserError("--lpips-weights also needs --perceptual-weights")
        return None
    return PerceptualDistance.load(weights, lpips_weights)


class _Halving(nn.Module):
    """A residual block of two 3×3 convolutions that halves the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_0 = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, inputs, H, W]` to `[b, outputs, H / 2, W / 2]`."""
        hidden = F.leaky_relu(self.conv_0(x), _SLOPE)
        hidden = F.leaky_relu(self.conv_1(F.avg_pool2d(hidden, 2)), _SLOPE)
        # Keep the variance constant over depth.
        return (hidden + self.shortcut(F.avg_pool2d(x, 2))) / 2.0**0.5


class Discriminator(nn.Module):
    """Scores images; higher means more like an image than a reconstruction."""

    def __init__(self, image_size: int, filters: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, filters, 3, padding=1)
        self.halvings = nn.ModuleList()
        side, width = image_size, filters
        while side > _SMALLEST_SIDE:
            wider = min(2 * width, _LARGEST_MULTIPLE * filters)
            self.halvings.append(_Halving(width, wider))
            side, width = side // 2, wider
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)
        self.dense = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Score images `[b, 3, H, W]` in [0, 1]: `[b]`."""
        x = F.leaky_relu(self.conv_in(2.0 * pixels - 1.0), _SLOPE)
        for halving in self.halvings:
            x = halving(x)
        x = F.leaky_relu(self.conv_out(x), _SLOPE).mean((2, 3))
        return self.score(F.leaky_relu(self.dense(x), _SLOPE)).squeeze(1)


def frozen(network: nn.Module, pixels: Tensor) -> Tensor:
    """Score images with a gradient with respect to the images only, not to the weights."""
    # Not `requires_grad_(False)`: the same weights are trained by other scores of this step.
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    return functional_call(network, weights, (pixels,))


def squared_slope(network: nn.Module, pixels: Tensor) -> Tensor:
    """Return ‖∇ D(x)‖² at images `[b, 3, H, W]`: float32 `[b]`.

    The result is differentiable, unless gradients are disabled, as in validation.
    """
    learns = torch.is_grad_enabled()
    # The slope is itself a gradient, so autograd is needed in validation too.
    with torch.enable_grad():
        leaf = pixels.detach().requires_grad_()
        scores = network(leaf).float()
        (slope,) = torch.autograd.grad(scores.sum(), leaf, create_graph=learns)
    return slope.float().square().sum((1, 2, 3))


def generator_loss(scores: Tensor) -> Tensor:
    """Return -log σ(D(reconstruction)) for scores `[b]`, the non-saturating loss: `[b]`."""
    return F.softplus(-scores.float())


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return -log σ(D(image)) - log(1 - σ(D(reconstruction))) for scores `[b]`: `[b]`."""
    return F.softplus(-real.float()) + F.softplus(fake.float())
