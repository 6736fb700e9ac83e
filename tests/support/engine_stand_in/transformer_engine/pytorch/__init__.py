"""Modules and FP8 contexts."""

import torch

from . import distributed, fp8, ops
from .fp8 import autocast, fp8_autocast
from .linear import Linear
from .norms import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "distributed",
    "fp8",
    "fp8_autocast",
    "ops",
]


# Megatron-Core derives classes of these when it is imported.
class LayerNormLinear(torch.nn.Module): ...


class DotProductAttention(torch.nn.Module): ...


class GroupedLinear(torch.nn.Module): ...
