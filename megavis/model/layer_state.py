"""State passed between layers: the hidden states, and extra tensors by name.

A pipeline stage receives only the output of the previous one. Other inputs of later layers
(visibility, positions, noisy patches) are therefore carried along, under names that the objective
declares and in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PackedState = Tensor | tuple[Tensor, ...]
"""A state as engines pass it between layers: just the hidden states if nothing is carried."""


@dataclass(frozen=True)
class LayerState:
    """Hidden states and carried tensors.

    Attributes:
        hidden: `[s, b, h]` (s split under sequence and context parallelism).
        carried: carried tensors by name; integers, or floats that need a gradient.
    """

    hidden: Tensor
    carried: Mapping[str, Tensor]

    @classmethod
    def unpack(cls, state: PackedState, names: Sequence[str]) -> LayerState:
        """Invert `pack`."""
        hidden, *rest = (state,) if isinstance(state, Tensor) else state
        return cls(hidden, dict(zip(names, rest, strict=True)))

    def pack(self) -> PackedState:
        """Return the form that engines pass between layers."""
        return (self.hidden, *self.carried.values()) if self.carried else self.hidden

    def with_hidden(self, hidden: Tensor) -> LayerState:
        """Return a state with other hidden states and the same carried tensors."""
        return LayerState(hidden, self.carried)


def as_bits(value: Tensor) -> Tensor:
    """View float32 as int32 of the same bits.

    DeepSpeed's pipeline expects a gradient for every float tensor that it passes; data has none.
    """
    return value.float().contiguous().view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """Invert `as_bits`."""
    return bits.view(torch.float32)
