"""Memory that training takes on one process before it has seen an image.

Activations come on top: they grow with the images of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.schema import ParallelConfig

# Bytes a parameter: Adam's two moments; a gradient or a master weight.
_ADAM, _FLOAT32 = 8, 4


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one process; what is offloaded counts nothing.

    Attributes:
        weights: in the compute precision.
        gradients: in float32.
        optimizer: Adam's moments, and under ZeRO 1 to 3 the float32 master weights, which DeepSpeed
            keeps beside the weights also where it computes in float32.
        gathered: under ZeRO-3, the largest layer, whole while it is used. This is the least:
            DeepSpeed keeps up to 10⁹ parameters whole where it can, to gather them less often.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def state_memory(
    num_parameters: int,
    largest_layer: int,
    *,
    parallel: ParallelConfig,
    precision: str,
    num_processes: int,
) -> StateMemory:
    """Return what a process holds.

    Args:
        num_parameters: of the whole model. Tensor and pipeline groups are taken to share them
            evenly, which holds but for norms, embedding and head.
        largest_layer: parameters of the largest layer.
        parallel: the layout.
        precision: `float32`, `bf16` or `fp16`.
        num_processes: of the job; a multiple of tensor size × pipeline size.
    """
    tensor, stage = parallel.tensor_model_parallel_size, parallel.zero_stage
    shared = tensor * parallel.pipeline_model_parallel_size
    compute = _FLOAT32 if precision == "float32" else 2

    def held(from_stage: int) -> float:
        """Parameters of which this process holds what ZeRO splits from that stage on."""
        return num_parameters / (num_processes if stage >= from_stage else shared)

    optimizer = _ADAM + (_FLOAT32 if stage else 0)
    return StateMemory(
        weights=held(3) * compute if parallel.offload_parameters == "none" else 0.0,
        gradients=held(2) * _FLOAT32,
        optimizer=held(1) * optimizer if parallel.offload_optimizer == "none" else 0.0,
        gathered=largest_layer / tensor * compute if stage == 3 else 0.0,
    )
