"""GIVT's adapter: an invertible map of latents to latents that are easier to predict.

"GIVT", section 3.3 and appendix B: a stack of volume-preserving additive coupling blocks after
i-RevNet. Each adds a function of one half of the channels to the other half and swaps the two, so
the Jacobian's determinant is 1 up to sign and the loss needs no additional term.

Legend: b images, c channels, h and w height and width of the latents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.model.parameters import truncated_normal

# The default of Flax's GroupNorm.
_EPSILON = 1e-6
_KERNEL = 3


class Adapter(nn.Module):
    """A stack of coupling blocks; `inverse` inverts `forward` up to rounding.

    Args:
        num_channels: c, even.
        num_blocks: number of coupling blocks, 8 in the paper.
        bottleneck: hidden channels for all c channels, twice a block's convolutions';
            4 · c in the paper.

    Raises:
        ValueError: c is odd, or the norms' groups do not divide the channels.
    """

    def __init__(self, num_channels: int, *, num_blocks: int = 8, bottleneck: int = 64) -> None:
        super().__init__()
        half, hidden = num_channels // 2, bottleneck // 2
        if num_channels % 2 or hidden % min(32, half) or half % min(32, half):
            raise ValueError(
                f"{num_channels} channels and bottleneck {bottleneck} do not divide into groups"
            )
        self.blocks = nn.ModuleList(
            CouplingBlock(half, hidden, is_first=i == 0) for i in range(num_blocks)
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Map latents `[b, c, h, w]` to the space in which they are predicted."""
        halves = latents.chunk(2, dim=1)
        for block in self.blocks:
            halves = block(*halves)
        return torch.cat(halves, dim=1)

    def inverse(self, adapted: Tensor) -> Tensor:
        """Map predictions `[b, c, h, w]` back to latents."""
        halves = adapted.chunk(2, dim=1)
        for block in reversed(self.blocks):
            assert isinstance(block, CouplingBlock)
            halves = block.inverse(*halves)
        return torch.cat(halves, dim=1)


class Convolution(nn.Conv2d):
    """A 3×3 convolution that initialises itself, before ZeRO-3 partitions its weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, _KERNEL, padding=1, bias=False)
        # LeCun initialization, as in the released code.
        truncated_normal((inputs * _KERNEL**2) ** -0.5)(self.weight)


class CouplingBlock(nn.Module):
    """(x₁, x₂) ↦ (x₂, x₁ + f(x₂)), where f is three 3×3 convolutions with norms and ReLU."""

    def __init__(self, half: int, hidden: int, *, is_first: bool) -> None:
        super().__init__()
        groups = min(32, half)
        # The first block does not normalise its input.
        self.norm_0 = None if is_first else nn.GroupNorm(groups, half, eps=_EPSILON)
        self.conv_0 = Convolution(half, hidden)
        self.norm_1 = nn.GroupNorm(groups, hidden, eps=_EPSILON)
        self.conv_1 = Convolution(hidden, hidden)
        self.norm_2 = nn.GroupNorm(groups, hidden, eps=_EPSILON)
        self.conv_2 = Convolution(hidden, half)

    def shift(self, half: Tensor) -> Tensor:
        """Return f of one half, `[b, c/2, h, w]` to `[b, c/2, h, w]`."""
        hidden = half if self.norm_0 is None else F.relu(self.norm_0(half))
        hidden = F.relu(self.norm_1(self.conv_0(hidden)))
        hidden = F.relu(self.norm_2(self.conv_1(hidden)))
        return self.conv_2(hidden)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Couple two halves `[b, c/2, h, w]`; sums are in the precision of the halves."""
        return second, first + self.rounded_shift(second)

    def inverse(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Invert `forward`."""
        return second - self.rounded_shift(first), first

    def rounded_shift(self, half: Tensor) -> Tensor:
        """Compute `shift` in the precision of the weights."""
        return self.shift(half.to(self.conv_0.weight.dtype)).to(half.dtype)
