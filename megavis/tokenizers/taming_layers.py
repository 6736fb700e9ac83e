"""Encoder and decoder of "Taming Transformers for High-Resolution Image Synthesis" (2021), table 7.

Residual blocks, half the resolution per level, attention in the middle and, in the VQGAN, in the
coarsest level. The VAEs of "High-Resolution Image Synthesis with Latent Diffusion Models" have the
same layers. Modules have the names of the released checkpoints.

Legend: b images, H and W pixels, h and w sides of the coarsest grid, z channels of the encoder's
output.
"""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from megavis.tokenizers.shapes import VQGANShape


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Build a group norm with the ε of the released networks."""
    return nn.GroupNorm(groups, channels, eps=1e-6)


class VQGANResidualBlock(nn.Module):
    """A residual block of two sequences of norm, swish and 3×3 convolution."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(inputs, groups), _conv(inputs, outputs)
        self.norm2, self.conv2 = group_norm(outputs, groups), _conv(outputs, outputs)
        self.nin_shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, inputs, h, w]` to `[b, outputs, h, w]`."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class AttentionBlock(nn.Module):
    """Residual single-head self-attention over all positions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = group_norm(width, groups)
        self.q, self.k, self.v = (nn.Conv2d(width, width, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, width, h, w]` to the same."""
        normed = self.norm(x)
        query, key, value = (f(normed).flatten(2).mT[:, None] for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        return x + self.proj_out(mixed.mT.unflatten(2, x.shape[2:]))


class Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.block_1 = VQGANResidualBlock(width, width, groups)
        self.attn_1 = AttentionBlock(width, groups)
        self.block_2 = VQGANResidualBlock(width, width, groups)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, width, h, w]` to the same."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Halve(nn.Module):
    """A 3×3 convolution with stride 2, zero-padded at the bottom and right."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, width, h, w]` to `[b, width, h / 2, w / 2]`."""
        # `nn.Conv2d` pads both sides equally; the released weights were trained with one padded.
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Double(nn.Module):
    """Nearest-neighbour upsampling by 2, then a 3×3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, width, h, w]` to `[b, width, 2 h, 2 w]`."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks, each followed by attention if the level attends."""

    def __init__(self, inputs: int, outputs: int, count: int, groups: int, attends: bool) -> None:
        super().__init__()
        widths = itertools.pairwise([inputs] + [outputs] * count)
        self.block = nn.ModuleList(VQGANResidualBlock(*pair, groups) for pair in widths)
        self.attn = nn.ModuleList(AttentionBlock(outputs, groups) for _ in range(count * attends))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, inputs, h, w]` to `[b, outputs, h, w]`."""
        for number, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[number](x)
        return x


class VQGANEncoder(nn.Module):
    """The encoder of the released VQGAN."""

    def __init__(
        self, shape: VQGANShape, *, attending: int = 1, outputs: int | None = None
    ) -> None:
        """Build with attention in the `attending` coarsest levels, and z or `outputs` channels."""
        super().__init__()
        groups, width = shape.norm_groups, shape.filters
        self.conv_in = _conv(3, width)
        self.down = nn.ModuleList()
        last = len(shape.multipliers) - 1
        for number, multiplier in enumerate(shape.multipliers):
            channels = shape.filters * multiplier
            attends = number > last - attending
            level = Level(width, channels, shape.blocks_per_level, groups, attends)
            width = channels
            if number < last:
                level.downsample = Halve(width)
            self.down.append(level)
        self.mid = Middle(width, groups)
        self.norm_out = group_norm(width, groups)
        self.conv_out = _conv(width, outputs or shape.latent_channels)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map `[b, 3, H, W]` in [-1, 1] to `[b, z, h, w]`, or as many channels as `outputs`."""
        x = self.conv_in(pixels)
        for number, level in enumerate(self.down):
            x = level(x)
            if number < len(self.down) - 1:
                x = level.get_submodule("downsample")(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class VQGANDecoder(nn.Module):
    """The decoder of the released VQGAN. Levels are numbered like the encoder's, finest first."""

    def __init__(self, shape: VQGANShape, *, attending: int = 1) -> None:
        """Build with attention in the `attending` coarsest levels."""
        super().__init__()
        groups, last = shape.norm_groups, len(shape.multipliers) - 1
        width = shape.filters * shape.multipliers[last]
        self.conv_in = _conv(shape.latent_channels, width)
        self.mid = Middle(width, groups)
        levels = []
        for number, multiplier in reversed(list(enumerate(shape.multipliers))):
            outputs = shape.filters * multiplier
            attends = number > last - attending
            level = Level(width, outputs, shape.blocks_per_level + 1, groups, attends)
            width = outputs
            if number > 0:
                level.upsample = Double(width)
            levels.append(level)
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out, self.conv_out = group_norm(width, groups), _conv(width, 3)

    def forward(self, coarse: Tensor) -> Tensor:
        """Map `[b, z, h, w]` to pixels `[b, 3, H, W]`, nominally in [-1, 1]."""
        x = self.mid(self.conv_in(coarse))
        for number, level in reversed(list(enumerate(self.up))):
            x = level(x)
            if number > 0:
                x = level.get_submodule("upsample")(x)
        return self.conv_out(F.silu(self.norm_out(x)))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)
