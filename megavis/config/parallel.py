"""The `parallel` section of a config: how a run is divided over processes."""

from __future__ import annotations

from typing import Literal

from megavis.config.section import Positive, Section


class ParallelConfig(Section):
    """Layout over processes; the data-parallel size is what remains."""

    tensor_model_parallel_size: Positive = 1
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = False
    """Split the norms' and residual's activations over the tensor group as well."""
    context_parallel_size: Positive = 1
    """Processes that share the tokens of the same images; attention trades tokens for heads."""
    pipeline_model_parallel_size: Positive = 1
    """Processes that hold consecutive blocks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 partitions optimizer states, 2 also gradients, 3 also weights."""
    hierarchical_partition_size: Positive = 1
    """With ZeRO-3: consecutive processes, best those of a node, that together keep another copy of
    the weights, from which all passes but the first of a step gather (ZeRO++, section 3.2.2)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Location of the optimizer states."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Location of ZeRO-3's weights between uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for nvme."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes norms and activation functions, `full` whole blocks."""

    @property
    def model_parallel_size(self) -> int:
        """Processes that train on the same images: tensor × context × pipeline size."""
        return self.head_parts * self.pipeline_model_parallel_size

    @property
    def head_parts(self) -> int:
        """Parts into which attention splits its heads: tensor × context size."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def head_parts_text(self) -> str:
        """`head_parts` by its keys, for messages."""
        text = f"tensor_model_parallel_size {self.tensor_model_parallel_size}"
        if self.context_parallel_size == 1:
            return text
        return f"{text} × context_parallel_size {self.context_parallel_size}"

    @property
    def token_parts(self) -> int:
        """Parts into which the residual stream is split by tokens."""
        return self.head_parts if self.sequence_parallel else self.context_parallel_size
