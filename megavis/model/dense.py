"""Pyramids of features, and heads that predict a class for each pixel from them.

"Unified Perceptual Parsing for Scene Understanding" (Xiao et al., 2018), on a plain Vision
Transformer, as in the code of "BEiT: BERT Pre-Training of Image Transformers": features of four
blocks become a pyramid of strides 4, 8, 16 and 32 for patches of 16 pixels. BEiT uses synchronized
batch norms; here all norms are over the channels of each cell, so an image's loss depends neither
on the other images nor on how they are divided over processes.

Legend: b images, h channels of the features, g × g cells of their grid, w channels of the head,
c classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_LEVELS = 4
_SIMPLE_EPSILON = 1e-6
"""ε of the norms in ViTDet's pyramid."""
_POOLED_SIDES = (1, 2, 3, 6)
"""Sides of the grids to which the smallest level is pooled (UPerNet's pyramid pooling module)."""


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each cell."""

    def forward(self, grid: Tensor) -> Tensor:
        """Normalise `[b, w, height, width]`."""
        return super().forward(grid.movedim(1, -1)).movedim(-1, 1)


class FeaturePyramid(nn.Module):
    """Features of four blocks at four times, twice, once and half the resolution of their grid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_4 = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, stride=2),
            ChannelNorm(width),
            nn.GELU(),
            nn.ConvTranspose2d(width, width, 2, stride=2),
        )
        self.up_2 = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.down = nn.MaxPool2d(2)

    def forward(self, grids: Sequence[Tensor]) -> list[Tensor]:
        """Map four grids `[b, h, g, g]`, the lowest block's first, to the four levels."""
        first, second, third, fourth = grids
        return [self.up_4(first), self.up_2(second), third, self.down(fourth)]


class SimplePyramid(nn.Module):
    """Five levels from the features of one block: strides 4 to 64 for patches of 16 pixels.

    "Exploring Plain Vision Transformer Backbones for Object Detection" (Li et al., 2022), section 3
    and its released code. The last level is every second cell of the one before.

    Args:
        width: h, channels of the features, divisible by 4.
        channels: w, of every level.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        half, quarter = width // 2, width // 4
        scaled: tuple[tuple[nn.Module, int], ...] = (
            (
                nn.Sequential(
                    nn.ConvTranspose2d(width, half, 2, stride=2),
                    ChannelNorm(half, eps=_SIMPLE_EPSILON),
                    nn.GELU(),
                    nn.ConvTranspose2d(half, quarter, 2, stride=2),
                ),
                quarter,
            ),
            (nn.ConvTranspose2d(width, half, 2, stride=2), half),
            (nn.Identity(), width),
            (nn.MaxPool2d(2), width),
        )
        self.levels = nn.ModuleList(
            nn.Sequential(
                scale,
                nn.Conv2d(own, channels, 1, bias=False),
                ChannelNorm(channels, eps=_SIMPLE_EPSILON),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                ChannelNorm(channels, eps=_SIMPLE_EPSILON),
            )
            for scale, own in scaled
        )

    def forward(self, grid: Tensor) -> list[Tensor]:
        """Map `[b, h, g, g]` to levels `[b, w, ...]` of sides 4 g, 2 g, g, g / 2 and g / 4."""
        levels = [level(grid) for level in self.levels]
        return [*levels, F.max_pool2d(levels[-1], 1, stride=2)]


class UPerHead(nn.Module):
    """UPerNet: pool the smallest level, add each level to the next larger one, concatenate all.

    Args:
        width: h, channels of the features.
        channels: w.
        dropout: share of the joined channels that are set to 0 in training.
    """

    def __init__(self, width: int, channels: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(_convolution(width, channels, 1) for _ in _POOLED_SIDES)
        joined = width + len(_POOLED_SIDES) * channels
        self.top = _convolution(joined, channels, 3)
        below = range(NUM_LEVELS - 1)
        self.lateral = nn.ModuleList(_convolution(width, channels, 1) for _ in below)
        self.smooth = nn.ModuleList(_convolution(channels, channels, 3) for _ in below)
        self.join = _convolution(NUM_LEVELS * channels, channels, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classes = nn.Conv2d(channels, num_classes, 1)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Map the levels `[b, h, ...]` to logits `[b, c, 4 g, 4 g]`."""
        *larger, smallest = levels
        parts = [smallest]
        for side, convolution in zip(_POOLED_SIDES, self.pooled, strict=True):
            parts.append(_resized(convolution(F.adaptive_avg_pool2d(smallest, side)), smallest))
        summed = [self.top(torch.cat(parts, dim=1))]
        for lateral, level in zip(reversed(self.lateral), reversed(larger), strict=True):
            own = lateral(level)
            summed.append(own + _resized(summed[-1], own))
        top, *others = summed
        smoothed = [each(grid) for each, grid in zip(self.smooth, reversed(others), strict=True)]
        joined = [_resized(grid, smoothed[0]) for grid in (*smoothed, top)]
        return self.classes(self.dropout(self.join(torch.cat(joined, dim=1))))


class FCNHead(nn.Module):
    """A convolution and class logits of one level; its auxiliary loss helps to train lower levels.

    "Fully Convolutional Networks for Semantic Segmentation" (Long et al., 2015); in BEiT's recipe
    on the third level, with 0.4 of the loss.
    """

    def __init__(self, width: int, channels: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        self.convolution = _convolution(width, channels, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classes = nn.Conv2d(channels, num_classes, 1)

    def forward(self, level: Tensor) -> Tensor:
        """Map `[b, h, g, g]` to logits `[b, c, g, g]`."""
        return self.classes(self.dropout(self.convolution(level)))


def _convolution(inputs: int, outputs: int, side: int) -> nn.Module:
    """Return a convolution that keeps the grid's size, its norm and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)
    return nn.Sequential(convolution, ChannelNorm(outputs), nn.ReLU())


def _resized(grid: Tensor, like: Tensor) -> Tensor:
    """Resize to the height and width of another grid, bilinearly."""
    return F.interpolate(grid, size=like.shape[2:], mode="bilinear", align_corners=False)
