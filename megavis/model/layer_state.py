"""State passed between layers: the hidden states, and extra tensors by name.

A pipeline stage sees nothing but what the stage before hands over. What a later layer needs
besides hidden states (visibility, positions, noisy patches) is therefore carried:
tensors under names that the objective declares, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PackedState = Tensor | tuple[Tensor, ...]
"""The form in which engines pass it on: the hidden states alone where nothing is carried."""


@dataclass(frozen=True)
class LayerState:
    """Hidden states and what is carried.

    Attributes:
        hidden: `[s, b, h]` (s split over the tensor group under sequence parallelism).
        carried: by name; integers, or floats of which every gradient is wanted.
    """

    hidden: Tensor
    carried: Mapping[str, Tensor]

    @classmethod
    def unpack(cls, state: PackedState, names: Sequence[str]) -> LayerState:
        """Read what `pack` gave."""
        hidden, *rest = (state,) if isinstance(state, Tensor) else state
        return cls(hidden, dict(zip(names, rest, strict=True)))

    def pack(self) -> PackedState:
        """Return the form that engines pass on."""
        return (self.hidden, *self.carried.values()) if self.carried else self.hidden

    def with_hidden(self, hidden: Tensor) -> LayerState:
        """Return other hidden states with the same things carried."""
        return LayerState(hidden, self.carried)


def as_bits(value: Tensor) -> Tensor:
    """View float32 as int32 of the same bits.

    DeepSpeed's pipeline expects a gradient for every float that it carried; data have none.
    """
    return value.float().contiguous().view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """Return the float32 that `as_bits` was given."""
    return bits.view(torch.float32)
