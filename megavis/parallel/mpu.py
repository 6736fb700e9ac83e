"""Process groups under the names that DeepSpeed expects."""

from __future__ import annotations

from megavis.parallel.context import Group, ParallelContext


class ModelParallelUnit:
    """The groups under the names that `deepspeed.initialize(mpu=...)` asks for.

    Without a pipeline the model-parallel group is the tensor group; with one, DeepSpeed makes its
    own view from the topology.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._tensor, self._data, self._pipeline = context.tensor, context.data, context.pipeline

    def get_model_parallel_group(self) -> Group:
        """Return the group that holds one copy of the model."""
        return self._tensor.group

    def get_model_parallel_world_size(self) -> int:
        """Return the size of that group."""
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        """Return this process's place in that group."""
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> Group:
        """Return the group over which gradients are averaged."""
        return self._data.group

    def get_data_parallel_world_size(self) -> int:
        """Return the number of model copies."""
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        """Return which copy this process belongs to."""
        return self._data.rank

    def get_pipeline_model_parallel_group(self) -> Group:
        """Return the group of pipeline stages."""
        return self._pipeline.group

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._pipeline.size

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return this process's stage."""
        return self._pipeline.rank
