"""How many parameters a model has, and where, without allocating them."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megavis.composition.trainable import Trainable
from megavis.model.parts import StackSize, block_weights, distinct_layers, stack_sizes, stacks_of
from megavis.model.stack import LayerPlan
from megavis.parallel.tensors import partition_dimension
from megavis.planning.stages import balanced_bounds


@dataclass(frozen=True)
class Matrix:
    """A parameter, and how many layers have one of the same name and shape."""

    name: str
    """With `*` for the number of the block: `blocks.*.mlp.linear_fc1.weight`."""
    part: str
    """Name of its layer, of a block that of its stack: `embedding`, `blocks` or `head`."""
    shape: tuple[int, ...]
    """Of the whole logical tensor, whatever the tensor-parallel size."""
    copies: int
    is_split: bool
    """True where the tensor group shares it out; each process holds all of the others."""

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
    found: Counter[tuple[str, str, tuple[int, ...], bool]] = Counter()
    # Blocks of a stack differ in what they drop alone: one is built for all.
    for plan, copies in distinct_layers(objective.layer_plans()):
        # Megatron draws its initial weights on the CPU; on the meta device that does nothing.
        with torch.device("meta"):
            layer = plan.build()
        for name, parameter in layer.named_parameters():
            general = re.sub(r"\.\d+\.", ".*.", f"{plan.name}.{name}", count=1)
            is_split = partition_dimension(parameter) is not None
            found[general, part_name(plan), tuple(parameter.shape), is_split] += copies
    return [
        Matrix(name, part, shape, copies, is_split)
        for (name, part, shape, is_split), copies in found.items()
    ]


def part_name(plan: LayerPlan) -> str:
    """Return the name of a layer, of a block that of its stack."""
    return plan.name if plan.stack is None else plan.stack.core.stack.name


def by_part(matrices: Iterable[Matrix]) -> dict[str, int]:
    """Return the parameters of each part of the model, in the model's order."""
    parts: Counter[str] = Counter()
    for matrix in matrices:
        parts[matrix.part] += matrix.parameters
    return dict(parts)


@dataclass(frozen=True)
class ModelPart:
    """A part of a model: a single layer, a stack of blocks, or one inside a layer.

    Attributes:
        name: begins its parameters' names.
        matrices: its parameters, without those of parts inside it.
        stack: its sizes, of a stack.
    """

    name: str
    matrices: tuple[Matrix, ...]
    stack: StackSize | None

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return sum(matrix.parameters for matrix in self.matrices)


def parts_of(matrices: Iterable[Matrix], plans: Sequence[LayerPlan]) -> list[ModelPart]:
    """Return the parts of a model, in its order."""
    stacks = {stack.name: stack for stack in stack_sizes(plans)}
    found: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        inside = (name for name in stacks if matrix.name.startswith(f"{name}."))
        found.setdefault(next(inside, matrix.part), []).append(matrix)
    return [ModelPart(name, tuple(own), stacks.get(name)) for name, own in found.items()]


@dataclass(frozen=True)
class StackParameters:
    """Parameters of a stack of equal blocks."""

    block: LayerParameters
    num_blocks: int


@dataclass(frozen=True)
class PipelineStage:
    """What a pipeline stage holds.

    Attributes:
        blocks: how many of each stack.
        tops: of each stack, whether its last block, and the bridge above it, is among them.
        is_first: the first layer, too.
        is_last: the head, too.
        share: of the work of all blocks.
    """

    blocks: tuple[int, ...]
    tops: tuple[bool, ...]
    is_first: bool
    is_last: bool
    share: float


@dataclass(frozen=True)
class Layers:
    """Parameters of the first layer, of the blocks of each stack, of bridges and the last layer."""

    first: LayerParameters
    stacks: tuple[StackParameters, ...]
    bridges: tuple[LayerParameters, ...]
    """Of the layers above each stack but the last."""
    last: LayerParameters
    weights: tuple[float, ...]
    """Work of each block, by which stages are cut; see `block_weights`."""

    @classmethod
    def of(cls, matrices: list[Matrix], plans: Sequence[LayerPlan]) -> Layers:
        """Sort a model's parameters by place; without blocks, the first part comes first."""
        stacks = stacks_of(plans)
        numbers = {stack.core.stack.name: stack.core.model.num_layers for stack in stacks}
        first, *others = by_part(matrices)
        between = _bridges_of(plans)
        names = {name for above in between for name in above} | set(numbers)
        return cls(
            first=_counted(m for m in matrices if m.part == first),
            stacks=tuple(
                StackParameters(_counted((m for m in matrices if m.part == name), count), count)
                for name, count in numbers.items()
            ),
            bridges=tuple(_counted(m for m in matrices if m.part in above) for above in between),
            last=_counted(m for m in matrices if m.part in others and m.part not in names),
            weights=tuple(block_weights(plans)[1]),
        )

    @property
    def total(self) -> int:
        """Of the whole model."""
        single = sum(layer.split + layer.whole for layer in (self.first, self.last, *self.bridges))
        return single + sum(
            stack.num_blocks * (stack.block.split + stack.block.whole) for stack in self.stacks
        )

    @property
    def num_blocks(self) -> int:
        """Of all stacks."""
        return sum(stack.num_blocks for stack in self.stacks)

    @property
    def is_even(self) -> bool:
        """True where all blocks are alike, and weigh alike."""
        return len(self.stacks) <= 1 and len(set(self.weights)) <= 1

    def largest(self, tensor_size: int) -> float:
        """Return what a process of a tensor group holds of the largest layer."""
        blocks = (stack.block for stack in self.stacks)
        return max(
            layer.held(tensor_size) for layer in (self.first, *blocks, *self.bridges, self.last)
        )

    def stages(self, num_stages: int) -> list[PipelineStage]:
        """Return what stages hold of which one may need most.

        Equal blocks are counted as in the largest stage, for the first one and the last.
        """
        if not self.is_even:
            return self._cut(num_stages)
        blocks = tuple(-(-stack.num_blocks // num_stages) for stack in self.stacks)
        share, last = sum(blocks) / max(1, self.num_blocks), num_stages - 1
        return [
            PipelineStage(blocks, (i == last,) * len(blocks), i == 0, i == last, share)
            for i in range(num_stages)
        ]

    def _cut(self, num_stages: int) -> list[PipelineStage]:
        stack_of = [k for k, stack in enumerate(self.stacks) for _ in range(stack.num_blocks)]
        tops = [*itertools.accumulate(stack.num_blocks for stack in self.stacks)]
        bounds = balanced_bounds(self.weights, num_stages)
        return [
            PipelineStage(
                blocks=tuple(stack_of[start:end].count(k) for k in range(len(self.stacks))),
                tops=tuple(start < top <= end for top in tops),
                is_first=start == 0,
                is_last=end == self.num_blocks,
                share=sum(self.weights[start:end]) / sum(self.weights),
            )
            for start, end in itertools.pairwise(bounds)
        ]

    def busiest(self, num_stages: int) -> PipelineStage:
        """Return the stage with most work."""
        return max(self.stages(num_stages), key=lambda stage: stage.share)

    def held(self, stage: PipelineStage, tensor_size: int) -> float:
        """Return the parameters of a process of a stage, whole over its data-parallel group."""
        pairs = zip(stage.blocks, self.stacks, strict=True)
        held = sum(count * stack.block.held(tensor_size) for count, stack in pairs)
        above = zip(self.bridges, stage.tops, strict=False)
        held += sum(bridge.held(tensor_size) for bridge, is_here in above if is_here)
        held += self.first.held(tensor_size) * stage.is_first
        return held + self.last.held(tensor_size) * stage.is_last


def _bridges_of(plans: Sequence[LayerPlan]) -> list[set[str]]:
    """Return the names of the layers above each stack but the last."""
    above: list[set[str]] = []
    for plan, _ in distinct_layers(plans[:-1]):
        if plan.stack is not None:
            above.append(set())
        elif above:
            above[-1].add(part_name(plan))
    return above[:-1]


def _counted(matrices: Iterable[Matrix], num_layers: int = 1) -> LayerParameters:
    """Return the parameters of one of `num_layers` equal layers that have these together."""
    counts = {True: 0, False: 0}
    for matrix in matrices:
        counts[matrix.is_split] += matrix.parameters // num_layers
    return LayerParameters(split=counts[True], whole=counts[False])
