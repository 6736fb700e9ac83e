"""A discriminator of images and reconstructions, and the losses of both sides.

A residual network after StyleGAN2's discriminator (Karras et al., 2020), with average pooling in
place of its blur. The losses are the non-saturating ones of "Generative Adversarial Nets" (2014)
with the R1 penalty of "Which Training Methods for GANs do actually Converge?" (equation 9).

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

_SLOPE = 0.2
_SMALLEST_SIDE = 4
_LARGEST_MULTIPLE = 8


class _Halving(nn.Module):
    """Two 3×3 convolutions and a skip, then half the side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_0 = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, inputs, H, W]` to `[b, outputs, H / 2, W / 2]`."""
        hidden = F.leaky_relu(self.conv_0(x), _SLOPE)
        hidden = F.leaky_relu(self.conv_1(F.avg_pool2d(hidden, 2)), _SLOPE)
        # Divided, so that depth does not raise the variance.
        return (hidden + self.shortcut(F.avg_pool2d(x, 2))) / 2.0**0.5


class Discriminator(nn.Module):
    """Images to one number each: how much it looks like an image and not a reconstruction."""

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
    """Score images with the gradient going to the images alone, not to the weights."""
    weights: Mapping[str, Tensor] = {n: p.detach() for n, p in network.named_parameters()}
    return functional_call(network, dict(weights), (pixels,))


def squared_slope(network: nn.Module, pixels: Tensor) -> Tensor:
    """Return ‖∇ D(x)‖² at images `[b, 3, H, W]`: float32 `[b]`.

    It can be differentiated again, unless gradients are off, as in validation.
    """
    learns = torch.is_grad_enabled()
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
