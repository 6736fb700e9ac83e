"""How many parameters a model has, and where, without allocating them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megavis.model.parts import distinct_layers
from megavis.objectives.trainable import Trainable
from megavis.parallel.tensors import partition_dimension


@dataclass(frozen=True)
class Matrix:
    """A parameter, and how many layers have one of the same name and shape."""

    name: str
    """With `*` for the number of the block: `blocks.*.mlp.linear_fc1.weight`."""
    shape: tuple[int, ...]
    """Of the whole logical tensor, whatever the tensor-parallel size."""
    copies: int
    is_split: bool
    """True where the tensor group shares it out; each process holds all of the others."""

    @property
    def part(self) -> str:
        """`embedding`, `blocks` or `head`."""
        return self.name.partition(".")[0]

    @property
    def parameters(self) -> int:
        """Numbers in all copies together."""
        return math.prod(self.shape) * self.copies


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer."""

    split: int
    """Numbers that the tensor group shares out."""
    whole: int
    """Numbers that every process of the tensor group holds."""

    def held(self, tensor_size: int) -> float:
        """Return how many one process of a tensor group holds."""
        return self.split / tensor_size + self.whole


def count_parameters(objective: Trainable) -> list[Matrix]:
    """Build the model's layers on the meta device, one at a time, and list what they hold.

    Args:
        objective: of a context with tensor size 1, so that shapes are those of whole tensors.
    """
    found: Counter[tuple[str, tuple[int, ...], bool]] = Counter()
    # Blocks of a stack differ in what they drop alone: one is built for all.
    for plan, copies in distinct_layers(objective.layer_plans()):
        # Megatron draws its initial weights on the CPU; on the meta device that does nothing.
        with torch.device("meta"):
            layer = plan.build()
        for name, parameter in layer.named_parameters():
            general = re.sub(r"\.\d+\.", ".*.", f"{plan.name}.{name}", count=1)
            is_split = partition_dimension(parameter) is not None
            found[general, tuple(parameter.shape), is_split] += copies
    return [
        Matrix(name, shape, copies, is_split) for (name, shape, is_split), copies in found.items()
    ]


def by_part(matrices: Iterable[Matrix]) -> dict[str, int]:
    """Return the parameters of each part of the model, in the model's order."""
    parts: Counter[str] = Counter()
    for matrix in matrices:
        parts[matrix.part] += matrix.parameters
    return dict(parts)


@dataclass(frozen=True)
class Layers:
    """Parameters of the first layer, of each block and of the last layer."""

    first: LayerParameters
    block: LayerParameters
    last: LayerParameters
    num_blocks: int

    @classmethod
    def of(cls, matrices: list[Matrix], num_blocks: int) -> Layers:
        """Sort out a model's parameters; without blocks, the first part stands in front."""
        first, *rest = by_part(matrices)
        return cls(
            first=_counted(m for m in matrices if m.part == first),
            block=_counted((m for m in matrices if m.part == "blocks"), max(1, num_blocks)),
            last=_counted(m for m in matrices if m.part in rest and m.part != "blocks"),
            num_blocks=num_blocks,
        )

    @property
    def total(self) -> int:
        """Of the whole model."""
        ends = sum(layer.split + layer.whole for layer in (self.first, self.last))
        return ends + self.num_blocks * (self.block.split + self.block.whole)

    def largest(self, tensor_size: int) -> float:
        """Return what a process of a tensor group holds of the largest layer."""
        return max(layer.held(tensor_size) for layer in (self.first, self.block, self.last))


def _counted(matrices: Iterable[Matrix], num_layers: int = 1) -> LayerParameters:
    """Return the parameters of one of `num_layers` equal layers that have these together."""
    counts = {True: 0, False: 0}
    for matrix in matrices:
        counts[matrix.is_split] += matrix.parameters // num_layers
    return LayerParameters(split=counts[True], whole=counts[False])
