"""Sizes, ranks and groups of this process: the only file that touches Megatron's parallel_state.

Rank order is Megatron's default and DeepSpeed's `PipeModelDataParallelTopology`: tensor fastest,
then data, then pipeline.

Process groups under the names that DeepSpeed expects.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d

from megavis.parallel.device import (
    answer_megatron,
    choose_device,
    select_device,
    set_arithmetic,
)
from megavis.parallel.launch import Launch

Group = dist.ProcessGroup
_Value = TypeVar("_Value")

MEETING_SECONDS = 600.0
"""How long processes wait for one another where they meet; and in a collective at least."""


@dataclass(frozen=True)
class Axis:
    """One way of dividing the work: a group of processes and this one's place in it."""

    group: Group
    size: int
    rank: int


@dataclass(frozen=True)
class ParallelContext:
    """Ranks and groups of this process on each axis, and its device."""

    tensor: Axis
    pipeline: Axis
    data: Axis
    model: Axis
    """Tensor × pipeline: the processes that hold one copy of the model."""
    world: Axis
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        """True where the embedding lives."""
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the head and the loss live."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_main(self) -> bool:
        """True on the one process that writes logs."""
        return self.world.rank == 0

    def from_main(self, value: _Value) -> _Value:
        """Return the main process's value on every process; every process calls this.

        Args:
            value: anything that can be pickled; those of other processes are ignored.
        """
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.world.group, device=self.device)
        return values[0]

    def megatron_groups(self) -> ProcessGroupCollection:
        """Return the groups in the form that Megatron's modules take as an argument."""
        return ProcessGroupCollection(
            tp=self.tensor.group, pp=self.pipeline.group, cp=_group_of_self(), mp=self.model.group
        )


def open_context(
    launch: Launch,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    device: str | None = None,
    timeout_seconds: float = MEETING_SECONDS,
    tf32: bool = False,
    deterministic: bool = False,
) -> ParallelContext:
    """Join the job's processes and divide them over the axes.

    Args:
        launch: this process's place.
        tensor_model_parallel_size: processes that share each layer.
        pipeline_model_parallel_size: processes that hold consecutive layers.
        device: `cpu` or `cuda`; CUDA where there is one when absent.
        timeout_seconds: how long a collective may wait for the slowest process.
        tf32: as `set_arithmetic` says.
        deterministic: likewise.

    Raises:
        UserError: there is no GPU for this process.
    """
    import deepspeed

    # DeepSpeed logs each of its settings at INFO, about a hundred lines a start.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    place = choose_device(device, local_rank=launch.local_rank)
    select_device(place)
    set_arithmetic(tf32=tf32, deterministic=deterministic)
    os.environ.update(launch.environment())
    if place.type == "cuda":
        # DeepSpeed takes it for the index of the GPU.
        os.environ["LOCAL_RANK"] = str(place.index)
    else:
        _skip_inference_collectives()
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_store_of_this_machine(launch, timedelta(seconds=MEETING_SECONDS)),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    return _context_on(place)


def set_timeouts(seconds: float) -> None:
    """Let collectives of every group that is open wait so long.

    Those that others have opened have torch's default, ten minutes with NCCL.
    """
    # torch has a public name for it since 2.14, and warns of the old one.
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        change(timedelta(seconds=seconds), group)


def _store_of_this_machine(launch: Launch, timeout: timedelta) -> dist.Store | None:
    """Return where processes of one machine meet; None where torch's own way is wanted.

    torch's own listens on every network of the machine, and has no password.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.master_address != "127.0.0.1" or kept_by_torchrun:
        return None
    listening = None
    if launch.rank == 0:
        listening = socket.create_server((launch.master_address, launch.master_port)).detach()
    return dist.TCPStore(
        launch.master_address,
        launch.master_port,
        launch.world_size,
        is_master=launch.rank == 0,
        timeout=timeout,
        master_listen_fd=listening,
    )


def open_virtual_context(
    rank: int,
    world_size: int,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    device: Literal["cpu", "meta"] = "cpu",
) -> ParallelContext:
    """Take one process's place in a job of any size, alone, to look at what it would build.

    The groups have their sizes; collectives return at once and move nothing.

    Args:
        rank: whose place.
        world_size: processes of the job.
        tensor_model_parallel_size: processes that share each layer.
        pipeline_model_parallel_size: processes that hold consecutive layers.
        device: `meta` to run layers without numbers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    answer_megatron(device)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    return _context_on(torch.device(device))


def current_context() -> ParallelContext | None:
    """Return the context that this process has open; None where it has none."""
    if not (dist.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return None
    if dist.get_backend() == "nccl":
        return _context_on(torch.device("cuda", torch.cuda.current_device()))
    return _context_on(torch.device("cpu"))


def tensor_rank() -> int:
    """Return this process's place in the tensor group of the context that is open."""
    return parallel_state.get_tensor_model_parallel_rank()


def _context_on(device: torch.device) -> ParallelContext:
    return ParallelContext(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        model=_axis(parallel_state.get_model_parallel_group()),
        world=_axis(dist.group.WORLD),
        device=device,
    )


def close_context() -> None:
    """Leave the job, so that this process can join another one."""
    import deepspeed.comm.comm as deepspeed_comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    # DeepSpeed keeps its groups in module globals and has no call that forgets them.
    deepspeed_comm.cdb = None
    for name in ("mpu", "_WORLD_GROUP", "mesh_device"):
        setattr(groups, name, None)
    # ZeRO-3 numbers modules and parameters in counters of the process, and asserts that all ranks
    # have the same numbers; ranks that were in different jobs before would not.
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)
    Init.param_id = 0


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_world_size(group), dist.get_rank(group))


def _group_of_self() -> Group:
    return parallel_state.get_context_parallel_group()


def _skip_inference_collectives() -> None:
    """Keep DeepSpeed from compiling a shared-memory all-reduce that only its inference calls.

    It would be built with g++ at every first start, and a process that is killed in the middle
    leaves a lock file for which every later start waits forever.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


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
