"""Peak memory of a process in training: model states, activations and buffers.

Model states are weights, gradients and optimizer states, as in "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (section 3, figure 1), with gradients accumulated in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megavis.planning.activation_memory import ActivationMemory, activation_memory
from megavis.planning.frozen_networks import FrozenNetwork
from megavis.planning.layouts import Layout
from megavis.planning.parameters import Layers
from megavis.planning.shape import ModelShape, number_size

# Bytes per parameter: a float32 gradient, master weight, moment or EMA.
FLOAT32 = 4
MOMENTS = {"adam": 2, "adafactor": 2, "sgd": 1, "lars": 1}
"""Moments by `optimizer.algorithm`; Adafactor's product of row and column means is stored whole."""
# DeepSpeed's defaults in elements: those flattened at once at ZeRO-0 and in bf16 at ZeRO-1, which
# no key changes, and the limit of gathered weights under ZeRO-3.
BUCKET, MOST_GATHERED = 500_000_000, 1_000_000_000
SMALLEST_BUCKET = 5_000_000
"""Elements of the smallest bucket: 20 MB in float32, below which latency bounds the network."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one process at the start of a step; offloaded states are not counted.

    Attributes:
        weights: weights in the compute precision, with the copy of hierarchical partitioning.
        gradients: gradients in float32.
        optimizer: moments and, under ZeRO 1 to 3, float32 master weights, which DeepSpeed
            keeps even if the weights are float32.
        average: EMA of the weights (`optimizer.ema_decay`) in float32; partitioned and offloaded
            with the optimizer's states.
        gathered: under ZeRO-3, the largest layer while it is gathered. This is the minimum:
            DeepSpeed keeps up to 10⁹ parameters gathered to reduce communication; with pipeline
            stages the next layer is gathered too.
        frozen: float32 weights of the networks that encode images, whole on each process that
            loads images.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    gathered: float
    frozen: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        trained = self.weights + self.gradients + self.optimizer + self.average
        return trained + self.gathered + self.frozen


def has_bf16_optimizer(zero_stage: int, precision: str) -> bool:
    """Return whether DeepSpeed's `BF16_Optimizer` is used, which keeps whole float32 gradients."""
    return zero_stage == 1 and precision == "bf16"


def bucket_size(block_parameters: int, tensor_size: int) -> int:
    """Return the number of gradients that ZeRO reduces at once, in elements: about one block's.

    DeepSpeed's default, 5·10⁸, is 3/4 of a ViT-H: reduction would only begin near the end of the
    backward pass.
    """
    return max(block_parameters // tensor_size, SMALLEST_BUCKET)


def bucket_of(shape: ModelShape, layout: Layout) -> int:
    """Return the gradients that a layout reduces at once, in elements."""
    if layout.zero_stage == 0 or has_bf16_optimizer(layout.zero_stage, shape.precision):
        return BUCKET
    return bucket_size(shape.main_stack.block_parameters, layout.tensor)


def parameters_held(layers: Layers, layout: Layout, stage: int = 0) -> float:
    """Return the parameters per process of a pipeline stage, before ZeRO partitioning."""
    return layers.held(layout.pipeline, layout.tensor)[stage]


def states_of(
    layers: Layers,
    layout: Layout,
    stage: int,
    *,
    precision: str,
    keeps_average: bool,
    trained: Layers | None = None,
    num_moments: int = 2,
    frozen: Sequence[FrozenNetwork] = (),
) -> StateMemory:
    """Return the model states of a process in a pipeline stage.

    Args:
        keeps_average: whether an EMA of the weights is kept.
        frozen: networks that encode images, on the first and last stage.
        trained: the parameters that are not frozen; default: all.
        num_moments: moments of each trained parameter; default: as in Adam and Adafactor.
    """
    parallel, zero_stage, size = layout.parallel, layout.zero_stage, number_size(precision)
    num_parameters = parameters_held(layers, layout, stage)
    num_trained = parameters_held(trained or layers, layout, stage)

    def held(count: float, from_stage: int) -> float:
        """Return the parameters per process of a state that ZeRO partitions from a stage on."""
        return count / (layout.replicas if zero_stage >= from_stage else 1)

    near = parallel.hierarchical_partition_size
    copied = num_parameters / near if near > 1 else 0.0
    on_device = parallel.offload_parameters == "none"
    own = held(num_trained, 1) if parallel.offload_optimizer == "none" else 0.0
    return StateMemory(
        weights=(held(num_parameters, 3) + copied) * size if on_device else 0.0,
        gradients=held(num_trained, 2) * FLOAT32,
        optimizer=own * FLOAT32 * (num_moments + (zero_stage > 0)),
        average=own * FLOAT32 * keeps_average,
        gathered=layers.largest(layout.tensor) * size if zero_stage == 3 else 0.0,
        frozen=sum(each.weights for each in frozen) if stage in (0, layout.pipeline - 1) else 0.0,
    )


def fullest_states(layers: Layers, layout: Layout, **options: Any) -> StateMemory:
    """Return the model states of the stage with the most; for the options see `states_of`."""
    states = (states_of(layers, layout, stage, **options) for stage in range(layout.pipeline))
    return max(states, key=lambda memory: memory.total)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of the process that needs the most, in bytes.

    Attributes:
        states: weights, gradients, optimizer.
        activations: activations of the micro-batches in flight.
        buffers: DeepSpeed's gradient bucket, weights that ZeRO-3 keeps gathered beyond the largest
            layer, and Megatron's buffer for gathered sequences.
        stage: pipeline stage of the process.
    """

    states: StateMemory
    activations: ActivationMemory
    buffers: float
    stage: int

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.states.total + self.activations.total + self.buffers


def rank_memory(shape: ModelShape, layout: Layout) -> RankMemory:
    """Return the memory of the process that needs the most."""
    stages = shape.layers.fullest_stages(layout.pipeline)
    return max((_memory_of(shape, layout, stage) for stage in stages), key=lambda m: m.total)


def _memory_of(shape: ModelShape, layout: Layout, stage: int) -> RankMemory:
    return RankMemory(
        states=states_of(
            shape.layers,
            layout,
            stage,
            precision=shape.precision,
            keeps_average=shape.keeps_average,
            trained=shape.trained,
            num_moments=MOMENTS[shape.optimizer],
            frozen=shape.frozen,
        ),
        activations=activation_memory(shape, layout, stage),
        buffers=_buffers(shape, layout, stage),
        stage=stage,
    )


def _buffers(shape: ModelShape, layout: Layout, stage: int) -> float:
    held = parameters_held(shape.layers, layout, stage)
    reduced = parameters_held(shape.trained, layout, stage)
    numbers = max(
        stack.hidden_size * layout.micro_batch_size * stack.work.num_tokens
        for stack in shape.stacks
    )
    # Megatron gathers sequences that the tensor group splits into one buffer of all layers.
    whole = shape.number_size * numbers * layout.parallel.sequence_parallel / layout.context
    half = has_bf16_optimizer(layout.zero_stage, shape.precision)
    if layout.zero_stage == 0 or half:
        # With several replicas, gradients are flattened one bucket at a time.
        flat = FLOAT32 + shape.number_size * half
        return whole + min(reduced, BUCKET) * flat * (layout.replicas > 1)
    gathered = 0.0
    if layout.zero_stage == 3:
        largest = shape.layers.largest(layout.tensor)
        most = MOST_GATHERED if layout.pipeline == 1 else 2 * largest
        gathered = max(0.0, min(held, most) - largest)
    # ZeRO-2 fills its bucket in the compute precision and averages a copy.
    averages_a_copy = layout.zero_stage == 2 and shape.gradient_size != shape.number_size
    bucket = shape.gradient_size + shape.number_size * averages_a_copy
    return whole + bucket_of(shape, layout) * bucket + gathered * shape.number_size
