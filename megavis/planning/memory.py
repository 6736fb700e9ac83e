"""Memory of one process in training: states, activations, and the buffers of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from megavis.planning.activations import ActivationMemory, activation_memory
from megavis.planning.layouts import Layout
from megavis.planning.shape import ModelShape
from megavis.planning.states import (
    FLOAT32,
    StateMemory,
    keeps_half_gradients,
    parameters_held,
    states_of,
)

# DeepSpeed's defaults, in numbers: a bucket of gradients that is reduced at once, and weights that
# ZeRO-3 keeps whole at a time.
BUCKET, MOST_GATHERED = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class RankMemory:
    """Everything that the fullest process holds, in bytes.

    Attributes:
        states: weights, gradients, optimizer.
        activations: of the micro-batches under way.
        buffers: DeepSpeed's bucket of gradients, weights that ZeRO-3 keeps whole beyond the
            largest layer, and Megatron's buffer for sequences that it gathers.
        stage: the pipeline stage that holds most.
    """

    states: StateMemory
    activations: ActivationMemory
    buffers: float
    stage: int

    @property
    def total(self) -> float:
        """All of them."""
        return self.states.total + self.activations.total + self.buffers


def rank_memory(shape: ModelShape, layout: Layout) -> RankMemory:
    """Return the memory of the process that needs most.

    Where all blocks are alike it is one of the first stage or the last.
    """
    last = layout.pipeline - 1
    stages = {0, last} if shape.layers.is_even else range(layout.pipeline)
    return max((_memory_of(shape, layout, stage) for stage in stages), key=lambda m: m.total)


def _memory_of(shape: ModelShape, layout: Layout, stage: int) -> RankMemory:
    return RankMemory(
        states=states_of(
            shape.layers,
            layout,
            stage,
            precision=shape.precision,
            keeps_average=shape.keeps_average,
        ),
        activations=activation_memory(shape, layout, stage),
        buffers=_buffers(shape, layout, stage),
        stage=stage,
    )


def _buffers(shape: ModelShape, layout: Layout, stage: int) -> float:
    held = parameters_held(shape.layers, layout, stage)
    numbers = max(
        stack.hidden_size * layout.micro_batch_size * stack.work.num_tokens
        for stack in shape.stacks
    )
    # Megatron gathers the inputs of a split sequence into one buffer that all layers share.
    whole = shape.number_size * numbers * (layout.token_parts > 1)
    half = keeps_half_gradients(layout.zero_stage, shape.precision)
    if layout.zero_stage == 0 or half:
        # Gradients are flattened, a bucket at a time, where there is someone to share them with.
        flat = FLOAT32 + shape.number_size * half
        return whole + min(held, BUCKET) * flat * (layout.data > 1)
    gathered = 0.0
    if layout.zero_stage == 3:
        gathered = max(0.0, min(held, MOST_GATHERED) - shape.layers.largest(layout.tensor))
    # ZeRO-2 fills its bucket in the compute precision, and averages a copy.
    averages_a_copy = layout.zero_stage == 2 and shape.gradient_size != shape.number_size
    bucket = shape.gradient_size + shape.number_size * averages_a_copy
    return whole + BUCKET * bucket + gathered * shape.number_size
