"""Model states of a process: weights, gradients, optimizer states.

"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3 and figure 1, with
float32 gradients as megavis accumulates them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.schema import ParallelConfig
from megavis.planning.layouts import Layout
from megavis.planning.parameters import Layers
from megavis.planning.shape import number_size

# Bytes a parameter: Adam's two moments; a gradient, a master weight or its moving average.
_ADAM, FLOAT32 = 8, 4


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one process before it has seen an image; what is offloaded counts nothing.

    Attributes:
        weights: in the compute precision.
        gradients: in float32; in bf16 under ZeRO-1 also those of the weights themselves, which
            DeepSpeed's optimizer for that case sets to zero and does not free.
        optimizer: Adam's moments, and under ZeRO 1 to 3 the float32 master weights, which DeepSpeed
            keeps in addition to the weights also where it computes in float32.
        average: the moving average of the weights (`optimizer.ema_decay`), in float32, which is
            split and offloaded with the optimizer's states.
        gathered: under ZeRO-3, the largest layer, whole while it is used. This is the least:
            DeepSpeed keeps up to 10⁹ parameters whole where it can, to gather them less often.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.average + self.gathered


def state_memory(
    num_parameters: float,
    largest_layer: float,
    *,
    parallel: ParallelConfig,
    precision: str,
    data_size: int,
    keeps_average: bool,
) -> StateMemory:
    """Return what a process holds.

    Args:
        num_parameters: in this process's slice of its stage, whole over the data-parallel group.
        largest_layer: parameters of its largest layer, likewise.
        parallel: the layout.
        precision: `float32`, `bf16` or `fp16`.
        data_size: data-parallel size.
        keeps_average: a moving average of the weights is kept.
    """
    stage, size = parallel.zero_stage, number_size(precision)

    def held(from_stage: int) -> float:
        """Parameters of which this process holds what ZeRO splits from that stage on."""
        return num_parameters / (data_size if stage >= from_stage else 1)

    optimizer = _ADAM + (FLOAT32 if stage else 0)
    own = held(1) if parallel.offload_optimizer == "none" else 0.0
    return StateMemory(
        weights=held(3) * size if parallel.offload_parameters == "none" else 0.0,
        gradients=held(2) * (FLOAT32 + size * keeps_half_gradients(stage, precision)),
        optimizer=own * optimizer,
        average=own * FLOAT32 * keeps_average,
        gathered=largest_layer * size if stage == 3 else 0.0,
    )


def keeps_half_gradients(zero_stage: int, precision: str) -> bool:
    """Return whether DeepSpeed keeps gradients of the weights in addition to those in float32."""
    return zero_stage == 1 and precision == "bf16"


def parameters_held(layers: Layers, layout: Layout, stage: int = 0) -> float:
    """Return the parameters of a pipeline stage's process, whole over its data-parallel group."""
    return layers.held(layers.stages(layout.pipeline)[stage], layout.tensor)


def states_of(
    layers: Layers, layout: Layout, stage: int, *, precision: str, keeps_average: bool
) -> StateMemory:
    """Return what a process of a pipeline stage holds before it has seen an image."""
    return state_memory(
        parameters_held(layers, layout, stage),
        layers.largest(layout.tensor),
        parallel=layout.parallel,
        precision=precision,
        data_size=layout.data,
        keeps_average=keeps_average,
    )


def fullest_states(
    layers: Layers, layout: Layout, *, precision: str, keeps_average: bool
) -> StateMemory:
    """Return it for the stage that holds most."""
    states = (
        states_of(layers, layout, stage, precision=precision, keeps_average=keeps_average)
        for stage in range(layout.pipeline)
    )
    return max(states, key=lambda memory: memory.total)
