"""Adaptive norms: a condition modulates the norms and the branches of a block.

"Scalable Diffusion Models with Transformers", section 3.2 (adaLN-Zero): a vector is mapped to a
shift and a scale of each norm's output, and to a gate of each branch. The maps are initialized to
zero, so that a block starts as the identity.

The vectors of all rows are carried with the hidden states and split like them, so each process maps
those of its own tokens. The maps are replicated over the tensor group, like norms.

Legend: s tokens, b images, h width.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megavis.model.parameters import set_partial_gradient

MODULATION = "modulation"
"""Name under which the vectors of the rows, `[s, b, h]`, are carried with the hidden states."""

OF_BLOCK, OF_NORM = 6, 2
"""Vectors that a block needs (shift, scale and gate of attention and of the MLP) and a last norm
(shift and scale)."""


class Modulation(nn.Module):
    """Maps a vector to vectors of the same width: SiLU and a linear map that starts at zero.

    Args:
        count: vectors that it returns.
    """

    def __init__(self, config: TransformerConfig, count: int) -> None:
        super().__init__()
        self.count = count
        width = config.hidden_size
        self.linear = nn.Linear(width, count * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        # Gradients of own tokens under sequence parallelism, as for a norm.
        if config.sequence_parallel:
            set_partial_gradient(self.parameters())

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Map `[..., h]` to `count` tensors of this shape."""
        return self.linear(F.silu(vector)).chunk(self.count, dim=-1)


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return normed · (1 + scale) + shift."""
    return normed * (1 + scale) + shift
