"""Ranks and process groups of this process; the only file that uses Megatron's parallel_state.

Ranks are ordered as Megatron does by default and DeepSpeed's `PipeModelDataParallelTopology` does:
tensor varies fastest, then context, then data, then pipeline. `ModelParallelUnit` provides the
groups to DeepSpeed, whose data-parallel group includes the context group.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d

from megavis.config.errors import UserError
from megavis.config.section import ParallelConfig
from megavis.parallel.device import (
    choose_device,
    device_kind,
    patch_megatron_device,
    select_device,
    set_arithmetic,
    set_variables,
)
from megavis.parallel.launch import LISTENING, Launch
from megavis.parallel.limits import allow_open_files

Group = dist.ProcessGroup
_Value = TypeVar("_Value")
_DATA_PARALLEL = ParallelConfig()

# For each open context, what restores what it replaced in this process: a command started later, by
# a notebook for example, must not mistake itself for a rank of the job.
_open: list[contextlib.ExitStack] = []
_end_of_engine: list[Callable[[], None]] = []

MEETING_SECONDS = 600.0
"""Rendezvous timeout, and minimum timeout of collectives."""


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism: a process group with its size and this process's rank."""

    group: Group
    size: int
    rank: int


@dataclass(frozen=True)
class ParallelContext:
    """The axes of parallelism as seen by this process, and its device."""

    tensor: Axis
    context: Axis
    """The processes that share the tokens of the same images."""
    pipeline: Axis
    data: Axis
    replicas: Axis
    """Context × data: the processes with the same weights, over which gradients are averaged and
    ZeRO partitions."""
    model: Axis
    """Tensor × pipeline: the processes that hold one copy of the model."""
    world: Axis
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        """True on the pipeline stage with the embedding."""
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the pipeline stage with the head and the loss."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes logs."""
        return self.world.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have arrived.

        Passes this process's GPU: torch would guess it from the rank, and hang where ranks and GPUs
        are ordered differently.
        """
        gpu = [self.device.index] if self.device.type == "cuda" else None
        dist.barrier(group=self.world.group, device_ids=gpu)

    def from_main(self, value: _Value) -> _Value:
        """Broadcast the main process's value; collective over all processes.

        Args:
            value: a picklable object; ignored on other processes.
        """
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.world.group, device=self.device)
        return values[0]

    def gather(self, value: _Value) -> list[_Value]:
        """Return the picklable values of all processes, by rank; collective over them."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.world.group)
        return values

    def smallest(self, value: int) -> int:
        """Return the smallest of the processes' values; collective over all processes."""
        least = torch.tensor(value, device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.world.group)
        return int(least)

    def on_main(self, compute: Callable[[], _Value]) -> _Value:
        """Compute a picklable value on the main process alone; collective over all processes.

        Raises:
            UserError: on every process, if `compute` raises it.
            OSError: likewise.
        """
        value: _Value | UserError | OSError | None = None
        if self.is_main:
            try:
                value = compute()
            except (UserError, OSError) as error:
                value = error
        result = self.from_main(value)
        if isinstance(result, UserError | OSError):
            raise result
        return cast("_Value", result)

    def megatron_groups(self) -> ProcessGroupCollection:
        """Return the groups as Megatron's modules take them."""
        return ProcessGroupCollection(
            tp=self.tensor.group,
            pp=self.pipeline.group,
            cp=self.context.group,
            mp=self.model.group,
        )


def open_context(
    launch: Launch,
    parallel: ParallelConfig = _DATA_PARALLEL,
    *,
    device: str | None = None,
    timeout_seconds: float = MEETING_SECONDS,
    tf32: bool = False,
    deterministic: bool = False,
) -> ParallelContext:
    """Initialise the job's process groups.

    A process alone may open a context inside another one: a command in a notebook, for example,
    where `megavis.load` has opened a run. They share their groups; the outer one destroys them.

    Args:
        launch: rank and rendezvous of this process.
        parallel: sizes of the groups; default: all processes are data-parallel.
        device: `cpu` or `cuda`; by default CUDA if available.
        tf32: see `set_arithmetic`.
        deterministic: see `set_arithmetic`.

    Raises:
        UserError: there is no GPU for this process, or its port is in use, or the process has
            already joined a job of several processes or on another device.
    """
    import deepspeed

    # DeepSpeed logs each of its settings at INFO, about a hundred lines.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    place = choose_device(device, local_rank=launch.local_rank)
    require_device(place.type)
    num_processes = max(launch.world_size, parallel.model_parallel_size)
    if _open and max(num_processes, dist.get_world_size()) > 1:
        raise UserError("this process has already joined a job; start the command in another one")
    select_device(place)
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(set_arithmetic(tf32=tf32, deterministic=deterministic))
        _enter_job(launch, place, replaced)
        if place.type == "cpu":
            _skip_inference_collectives()
        # Each gloo group takes three more file descriptors than there are processes.
        allow_open_files()
        backend = "nccl" if place.type == "cuda" else "gloo"
        if not _open:
            _join(launch, backend, timedelta(seconds=timeout_seconds))
            replaced.callback(dist.destroy_process_group)
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        if not _open:
            _make_groups(parallel, replaced, timeout_seconds)
        context = _context_on(place)
        # Keep the stack only now: an error before this line undoes everything at once.
        _open.append(replaced.pop_all())
    return context


def _enter_job(launch: Launch, place: torch.device, replaced: contextlib.ExitStack) -> None:
    """Set this process's variables; `replaced` restores them and what libraries replace."""
    variables = launch.environment()
    if place.type == "cuda":
        # DeepSpeed uses it as the index of the GPU.
        variables["LOCAL_RANK"] = str(place.index)
    # torch's exception hook, which prefixes the rank, and ZeRO-3's slower `linear` would stay.
    for owner, name in ((sys, "excepthook"), (F, "linear")):
        replaced.callback(setattr, owner, name, getattr(owner, name))
    replaced.enter_context(set_variables(variables))


def _make_groups(
    parallel: ParallelConfig,
    replaced: contextlib.ExitStack,
    timeout_seconds: float = MEETING_SECONDS,
) -> None:
    """Make the groups of a layout, which `replaced` destroys."""
    replaced.callback(parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        # Megatron would use them for its own checkpoints and optimizers, which do not run here.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_seconds / 60,
    )


def require_device(name: str) -> None:
    """Raise UserError if a context is open on another kind of device than `cpu` or `cuda`."""
    joined, name = current_context(), device_kind(name)
    if joined is not None and joined.device.type != name:
        raise UserError(
            f"a run is open on {joined.device.type} in this process, so nothing else can use"
            f" {name}; start another process"
        )


def joined_device(otherwise: str | None) -> str | None:
    """Return the device type of the open context, or `otherwise` if none is open."""
    joined = current_context()
    return otherwise if joined is None else joined.device.type


def set_timeouts(seconds: float) -> None:
    """Set the timeout of collectives for all existing process groups.

    Groups created by other libraries have torch's default, ten minutes with NCCL.
    """
    # Public since torch 2.14, where the private name is deprecated.
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        change(timedelta(seconds=seconds), group)


def _join(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Meet the other processes; raise UserError if another program listens at the address."""
    try:
        dist.init_process_group(
            backend,
            store=_store_of_this_machine(launch, timedelta(seconds=MEETING_SECONDS)),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (OSError, dist.DistNetworkError) as error:
        # torch's error has no errno.
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
        if not in_use:
            raise
        raise UserError(
            f"port {launch.master_port} of {launch.master_address}, where the processes of this job"
            " would meet, is in use by another program; set MASTER_PORT to a free one"
        ) from None


def _store_of_this_machine(launch: Launch, timeout: timedelta) -> dist.Store | None:
    """Return a loopback store if all processes are on this machine; None for torch's default.

    torch's default store listens on all network interfaces without authentication.
    """
    if launch.world_size == 1:
        # One process needs no port.
        return dist.HashStore()
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.master_address != "127.0.0.1" or kept_by_torchrun:
        return None
    listening = None
    if launch.rank == 0:
        address = (launch.master_address, launch.master_port)
        taken = LISTENING.pop(launch.master_port, None) or socket.create_server(address)
        listening = taken.detach()
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
    parallel: ParallelConfig = _DATA_PARALLEL,
    *,
    device: Literal["cpu", "meta"] = "cpu",
) -> ParallelContext:
    """Act as one rank of a job of any size, to inspect what it would build.

    Groups have their sizes, but collectives return at once and communicate nothing.

    Args:
        world_size: processes of the job.
        parallel: sizes of its groups.
        device: `meta` to run layers on shapes only.

    Raises:
        UserError: a context is open.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if _open:
        raise UserError(
            "this command pretends to be one of several processes, which it cannot where a run is"
            " open; start it in another process, in a notebook with ! before it"
        )
    patch_megatron_device(device)
    with contextlib.ExitStack() as replaced:
        replaced.callback(setattr, sys, "excepthook", sys.excepthook)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        replaced.callback(dist.destroy_process_group)
        _make_groups(parallel, replaced)
        _open.append(replaced.pop_all())
    return _context_on(torch.device(device))


def num_contexts() -> int:
    """Return how many contexts are open in this process, one inside the other."""
    return len(_open)


def current_context() -> ParallelContext | None:
    """Return the open context of this process, or None."""
    if not (dist.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return None
    if dist.get_backend() == "nccl":
        return _context_on(torch.device("cuda", torch.cuda.current_device()))
    return _context_on(torch.device("cpu"))


def tensor_rank() -> int:
    """Return this process's rank in the tensor group of the open context."""
    return parallel_state.get_tensor_model_parallel_rank()


def _context_on(device: torch.device) -> ParallelContext:
    return ParallelContext(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        replicas=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        model=_axis(parallel_state.get_model_parallel_group()),
        world=_axis(dist.group.WORLD),
        device=device,
    )


def close_context() -> None:
    """Close the context that was opened last, if any, and restore the environment before it.

    With the only one all process groups are destroyed, so that another job can be joined.
    """
    if not _open:
        return
    import deepspeed.comm.comm as deepspeed_comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    # Forget the engines of a failed job: ending one would wait for its device.
    _end_of_engine.clear()
    with _open.pop():
        # DeepSpeed keeps its groups in module globals and has no function to reset them.
        deepspeed_comm.cdb = None
        groups.mpu = groups._WORLD_GROUP = groups.mesh_device = None
        # ZeRO-3 numbers modules and parameters with process-wide counters and asserts that all
        # ranks agree; ranks that ran different jobs before would not.
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)
        Init.param_id = 0


def leave_context(*, has_failed: bool) -> None:
    """Close the context that was opened last, unless that would not end.

    NCCL destroys its groups only with all their processes. Others may be in a collective that waits
    for one that has failed, which must then end with its groups open; see `cli.run_process`.
    """
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    if not (has_failed and is_nccl and dist.get_world_size() > 1):
        close_context()


def end_with_job(end: Callable[[], None]) -> None:
    """Register a function that ends an engine of this process's job; see `end_engines`."""
    _end_of_engine.append(end)


def end_engines() -> None:
    """End the engines of this process, so that the garbage collector can free their memory.

    Their hooks refer to them from C++, where the collector does not look. DeepSpeed's ZeRO-3 also
    keeps every module that it has run, in a global list and in a method's cache.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    while _end_of_engine:
        _end_of_engine.pop()()
    parameter_offload.FWD_MODULE_STACK.clear()
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_world_size(group), dist.get_rank(group))


def _skip_inference_collectives() -> None:
    """Keep DeepSpeed from compiling a shared-memory all-reduce that only its inference uses.

    It would be built with g++ at the first start, and a process killed during the build leaves a
    lock file on which every later start blocks.
    """
    import deepspeed.ops

    # Reading the attribute would probe every operator of DeepSpeed with the compiler first.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


class ModelParallelUnit:
    """The process groups with the interface of `deepspeed.initialize(mpu=...)`.

    Without a pipeline the model-parallel group is the tensor group; with one, DeepSpeed derives its
    groups from the topology.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._tensor, self._replicas = context.tensor, context.replicas

    def get_model_parallel_group(self) -> Group:
        """Return the group that holds one copy of the model."""
        return self._tensor.group

    def get_model_parallel_world_size(self) -> int:
        """Return the size of that group."""
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        """Return this process's rank in that group."""
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> Group:
        """Return the group over which gradients are averaged."""
        return self._replicas.group

    def get_data_parallel_world_size(self) -> int:
        """Return the number of model copies."""
        return self._replicas.size

    def get_data_parallel_rank(self) -> int:
        """Return the index of this process's model copy."""
        return self._replicas.rank
