"""Count the parameters of a model by layer and pipeline stage, without allocating them.

Stages have about equal work.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from megavis.composition.trainable import Trainable
from megavis.model.parameters import partition_dimension
from megavis.model.stack import (
    LayerPlan,
    StackSize,
    alike_layers,
    block_weights,
    distinct_layers,
    stack_sizes,
    stacks_of,
)


@dataclass(frozen=True)
class Matrix:
    """A parameter tensor, and the number of layers that have it with this name and shape."""

    name: str
    """Name with `*` for the block index: `blocks.*.mlp.linear_fc1.weight`."""
    part: str
    """Layer, or the stack of a block: `embedding`, `blocks` or `head`."""
    shape: tuple[int, ...]
    """Shape of the full logical tensor, for any tensor-parallel size."""
    copies: int
    is_split: bool
    """Whether it is split over the tensor group; other parameters are replicated."""
    is_trained: bool = True
    """False for frozen parameters, as in linear evaluation."""

    @property
    def parameters(self) -> int:
        """Number of elements over all layers."""
        return math.prod(self.shape) * self.copies


@dataclass(frozen=True)
class LayerParameters:
    """Number of parameters of one layer."""

    split: int
    """Elements split over the tensor group."""
    whole: int
    """Elements replicated in the tensor group."""

    def held(self, tensor_size: int) -> float:
        """Return the elements per process of a tensor group."""
        return self.split / tensor_size + self.whole


def count_parameters(objective: Trainable) -> list[Matrix]:
    """Build the model's layers on the meta device, one at a time, and list their parameters.

    The objective's context has tensor size 1, so shapes are of full tensors.
    """
    found: Counter[tuple[str, str, tuple[int, ...], bool, bool]] = Counter()
    # Build only one of the blocks that differ only in drop rates.
    for plan, copies in alike_layers(objective.layer_plans()):
        # Megatron initializes weights on the CPU; on the meta device this is a no-op.
        with torch.device("meta"):
            layer = plan.build()
        for name, parameter in layer.named_parameters():
            general = re.sub(r"\.\d+\.", ".*.", f"{plan.name}.{name}", count=1)
            is_split = partition_dimension(parameter) is not None
            kind = is_split, parameter.requires_grad
            found[general, part_name(plan), tuple(parameter.shape), *kind] += copies
    return [
        Matrix(name, part, shape, copies, is_split, is_trained)
        for (name, part, shape, is_split, is_trained), copies in found.items()
    ]


def trained_only(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Return the same matrices with no copies of the frozen ones."""
    return [matrix if matrix.is_trained else replace(matrix, copies=0) for matrix in matrices]


def part_name(plan: LayerPlan) -> str:
    """Return the name of a layer, or of a block's stack."""
    return plan.name if plan.stack is None else plan.stack.core.stack.name


def by_part(matrices: Iterable[Matrix]) -> dict[str, int]:
    """Return the number of parameters of each part, in the model's order."""
    parts: Counter[str] = Counter()
    for matrix in matrices:
        parts[matrix.part] += matrix.parameters
    return dict(parts)


@dataclass(frozen=True)
class ModelPart:
    """A part of a model: a layer, a stack of blocks, or a stack inside a layer.

    `matrices` are its parameters, without those inside its parts, and `name` their prefix.
    """

    name: str
    matrices: tuple[Matrix, ...]
    stack: StackSize | None

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(matrix.parameters for matrix in self.matrices)


def parts_of(matrices: Iterable[Matrix], plans: Sequence[LayerPlan]) -> list[ModelPart]:
    """Return the parts of a model in order."""
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
    """Content of a pipeline stage.

    Attributes:
        blocks: number of blocks of each stack.
        tops: for each stack, whether the stage has its last block and the bridge above it.
        is_first: whether it has the first layer.
        is_last: whether it has the head.
        share: fraction of the work of all blocks.
    """

    blocks: tuple[int, ...]
    tops: tuple[bool, ...]
    is_first: bool
    is_last: bool
    share: float


@dataclass(frozen=True)
class Layers:
    """Parameters of the first layer, the blocks of each stack, bridges and the last layer."""

    first: LayerParameters
    stacks: tuple[StackParameters, ...]
    bridges: tuple[LayerParameters, ...]
    """Parameters of the layers above each stack but the last."""
    last: LayerParameters
    weights: tuple[float, ...]
    """Work of each block, by which stages are balanced; see `block_weights`."""

    @classmethod
    def of(cls, matrices: list[Matrix], plans: Sequence[LayerPlan]) -> Layers:
        """Group parameters by layer; without blocks, the first part is the first layer."""
        stacks = stacks_of(plans)
        numbers = {
            stack.core.stack.name: sum(plan.stack is stack for plan in plans) for stack in stacks
        }
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
        """Number of parameters of the model."""
        single = sum(layer.split + layer.whole for layer in (self.first, self.last, *self.bridges))
        return single + sum(
            stack.num_blocks * (stack.block.split + stack.block.whole) for stack in self.stacks
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all stacks."""
        return sum(stack.num_blocks for stack in self.stacks)

    @property
    def is_even(self) -> bool:
        """Whether all blocks are equal in parameters and work."""
        return len(self.stacks) <= 1 and len(set(self.weights)) <= 1

    def largest(self, tensor_size: int) -> float:
        """Return the parameters of the largest layer per process of a tensor group."""
        blocks = (stack.block for stack in self.stacks)
        return max(
            layer.held(tensor_size) for layer in (self.first, *blocks, *self.bridges, self.last)
        )

    def stages(self, num_stages: int) -> tuple[PipelineStage, ...]:
        """Return the stages; if all blocks are equal, with the largest number of blocks each."""
        if num_stages not in self._stages:
            stages = self._even(num_stages) if self.is_even else self._cut(num_stages)
            self._stages[num_stages] = tuple(stages)
        return self._stages[num_stages]

    def fullest_stages(self, num_stages: int) -> tuple[int, ...]:
        """Return the indexes of the stages of which one needs the most memory.

        Of equal stages between the first and the last, it is the lowest, since no other has more
        micro-batches in flight.
        """
        last, stages = num_stages - 1, self.stages(num_stages)
        contents = [(stage.blocks, stage.tops) for stage in stages]
        middle = (i for i in range(1, last) if i == 1 or contents[i] != contents[i - 1])
        return tuple(dict.fromkeys((0, *middle, last)))

    # `megavis plan` compares thousands of layouts, each of which asks for these many times.
    @functools.cached_property
    def _stages(self) -> dict[int, tuple[PipelineStage, ...]]:
        return {}

    @functools.cached_property
    def _held(self) -> dict[tuple[int, int], tuple[float, ...]]:
        return {}

    def _even(self, num_stages: int) -> list[PipelineStage]:
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
        """Return the stage with the most work."""
        return max(self.stages(num_stages), key=lambda stage: stage.share)

    def held(self, num_stages: int, tensor_size: int) -> tuple[float, ...]:
        """Return the parameters per process of each stage, before ZeRO partitioning."""
        if (key := (num_stages, tensor_size)) not in self._held:
            stages = self.stages(num_stages)
            self._held[key] = tuple(self._held_by(stage, tensor_size) for stage in stages)
        return self._held[key]

    def _held_by(self, stage: PipelineStage, tensor_size: int) -> float:
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
    """Return the parameters of one of `num_layers` equal layers with these in total."""
    counts = {True: 0, False: 0}
    for matrix in matrices:
        counts[matrix.is_split] += matrix.parameters
    return LayerParameters(split=counts[True] // num_layers, whole=counts[False] // num_layers)


def stage_bounds(plans: Sequence[LayerPlan], num_stages: int) -> list[int]:
    """Divide a list of layers into stages of about equal work, each with at least one block.

    Returns bounds: stage i holds `layers[bounds[i]:bounds[i + 1]]`.
    """
    places, weights = block_weights(plans)
    inner = balanced_bounds(tuple(weights), num_stages)[1:-1]
    return [0, *(places[block] for block in inner), len(plans)]


# Cached, since each of the hundreds of layouts that `megavis plan` compares calls it.
@functools.cache
def balanced_bounds(weights: tuple[float, ...], num_parts: int) -> tuple[int, ...]:
    """Divide weights into consecutive non-empty parts with the least possible largest sum.

    Among these, choose the division with the largest smallest part, then the one with the latest
    bounds, as DeepSpeed's `partition_balanced` does for equal weights. Returns bounds: part i is
    `weights[bounds[i]:bounds[i + 1]]`.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    # By number of weights: largest part, smallest part and bounds of the best division.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, math.inf, [0])}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(1, len(sums)):
            cuts = [
                (max(most, part), min(least, part), [*bounds, end])
                for start, (most, least, bounds) in best.items()
                if start < end
                for part in [sums[end] - sums[start]]
            ]
            if cuts:
                # Prefer the last of equally good ones.
                longer[end] = min(reversed(cuts), key=lambda cut: (cut[0], -cut[1]))
        best = longer
    return tuple(best[len(weights)][2])
