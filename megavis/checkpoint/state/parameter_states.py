"""A parameter's float32 weight and optimizer states, at any ZeRO stage.

DeepSpeed partitions and flattens them differently at each stage. Here a tensor is always this
process's tensor-parallel slice, of which a process holds a range of elements in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from megavis.checkpoint.format.manifest import TensorKind
from megavis.model.stack import LocalLayers
from megavis.parallel.context import ParallelContext

AVERAGE: TensorKind = "average"
"""EMA of the weights; also its key in the optimizer's state."""


class ParameterStates:
    """Read and write the training state of parameters inside a DeepSpeed engine.

    All methods are collective over the data-parallel group: call them for the same parameters.

    Attributes:
        layers: the layers of this process, whose parameters these are.
        context: the job.
        averages: whether the engine keeps an EMA of the weights.
    """

    def __init__(
        self,
        engine: Any,
        layers: LocalLayers,
        context: ParallelContext,
        *,
        zero_stage: int,
        averages: bool,
    ) -> None:
        self._engine, self._zero_stage = engine, zero_stage
        self.layers, self.context, self.averages = layers, context, averages

    def kinds(self, parameter: nn.Parameter) -> tuple[TensorKind, ...]:
        """Return the kinds of state that a parameter has; a frozen one has only a weight."""
        if not parameter.requires_grad:
            return ("weight",)
        return ("weight", *self._moments, *((AVERAGE,) if self.has(AVERAGE) else ()))

    def has(self, kind: TensorKind) -> bool:
        """Return whether the optimizer has this state yet."""
        return any(kind in state for state in self.optimizer.state.values())

    def get(self, parameter: nn.Parameter, kind: TensorKind) -> Tensor:
        """Return the float32 slice; zeros for moments that do not exist yet."""
        value: Tensor | None
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=_is_split(parameter)):
                value = parameter.detach().clone()
        elif self._zero_stage == 0:
            state = self._engine.optimizer.state.get(parameter, {})
            value = parameter.detach() if kind == "weight" else state.get(kind)
        elif kind == "weight":
            value = safe_get_full_fp32_param(parameter)
        elif not self.has(kind):
            value = None
        else:
            self._link(parameter, kind)
            value = safe_get_full_optimizer_state(parameter, kind)
        if value is None:
            return torch.zeros(logical_shape(parameter), dtype=torch.float32)
        return value.float()

    def held(self, parameter: nn.Parameter, kind: TensorKind) -> range:
        """Return the elements, in row-major order, that `set_held` takes: those held here.

        These are all elements if a process needs the whole tensor and cannot gather it from others.
        """
        if self._zero_stage == 0 or not parameter.requires_grad:
            return held_elements(parameter)
        if self._zero_stage == 3:
            # Below DeepSpeed's threshold, every process keeps the whole tensor, so its copy needs
            # all elements.
            if kind == "weight" and parameter.ds_persist:  # type: ignore[attr-defined]
                return held_elements(parameter)
            return _partition(parameter)
        mapping = _mapping(parameter)
        if mapping is None:
            return range(0)
        address = mapping.lp_fragment_address
        return range(address.start, address.start + address.numel)

    def set(self, parameter: nn.Parameter, kind: TensorKind, value: Tensor) -> None:
        """Write the float32 slice; a weight also updates the copy in the compute precision."""
        held = self.held(parameter, kind)
        self.set_held(parameter, kind, value.flatten()[held.start : held.stop])

    def set_held(self, parameter: nn.Parameter, kind: TensorKind, values: Tensor) -> None:
        """Write the elements of `held`, given as a vector; otherwise like `set`."""
        if not parameter.requires_grad:
            set_held_elements(parameter, values)
        elif self._zero_stage == 0:
            state = self._engine.optimizer.state
            target = parameter.data if kind == "weight" else state[parameter][kind]
            target.copy_(values.view_as(target))
        elif self._zero_stage == 3:
            self._set_partition(parameter, kind, values)
        else:
            mapping = _mapping(parameter)
            if mapping is not None:
                fragment = mapping.get_hp_fragment(None if kind == "weight" else kind)
                fragment.data.copy_(values)
            if kind == "weight":
                # Every process has the whole copy in the compute precision. Gathering it over the
                # network is faster than N processes reading the whole tensor from disk.
                parameter.data.copy_(self.get(parameter, kind))

    @torch.no_grad()
    def show(self, parameter: nn.Parameter, kind: TensorKind) -> None:
        """Use the EMA of a parameter, or its weight again, in forward passes."""
        if self._zero_stage:
            set_gathered(parameter, self.get(parameter, kind))
            return
        # There is no separate master weight, so swap the two.
        average = self.optimizer.state[parameter][AVERAGE]
        shown = average.clone()
        average.copy_(parameter)
        parameter.copy_(shown)

    def _set_partition(self, parameter: nn.Parameter, kind: TensorKind, values: Tensor) -> None:
        # DeepSpeed's setter for full tensors ignores the padding of sizes that are not divisible.
        part = _partition(parameter)
        mine = values[part.start : part.stop] if len(values) > len(part) else values
        split: Any = parameter
        local = nn.functional.pad(mine, (0, split.ds_tensor.ds_numel - len(part)))
        # Until it is fetched, the partition of a weight on NVMe has one element, with which
        # DeepSpeed would fill the float32 partition.
        is_away = split.ds_tensor.status is not PartitionedParamStatus.AVAILABLE
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_away):
            if kind == "weight":
                safe_set_local_fp32_param(parameter, local)
            else:
                safe_set_local_optimizer_state(parameter, local, kind)
        if kind == "weight" and len(held_elements(parameter)) == len(values):
            set_held_elements(parameter, values)
        elif kind == "weight":
            set_gathered(parameter, self.get(parameter, kind))

    def optimizer_step(self) -> int:
        """Return the optimizer's step count."""
        optimizer = self.optimizer
        if self._counts_by_group:
            return int(optimizer.param_groups[0]["step"])
        counts = (state["step"] for state in optimizer.state.values() if "step" in state)
        return int(next(counts, 0))

    def create_states(self, optimizer_step: int, *, with_average: bool) -> None:
        """Create the optimizer's states with a step count, so that they can be set.

        Existing tensors are kept, since DeepSpeed refers to them.
        """
        optimizer = self.optimizer
        for master in self._masters():
            state = optimizer.state[master]
            if not self._counts_by_group:
                state["step"] = torch.tensor(float(optimizer_step), device=master.device)
            for kind in (*self._moments, *((AVERAGE,) if with_average else ())):
                state.setdefault(kind, torch.zeros_like(master))
        if self._counts_by_group:
            for group in optimizer.param_groups:
                group["step"] = optimizer_step
        if self._zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _link(self, parameter: nn.Parameter, kind: TensorKind) -> None:
        """Make a state known to DeepSpeed's ZeRO 1 and 2.

        They look states up only once, after the first step of the first parameter group, when
        other groups have none yet.
        """
        if self._zero_stage not in (1, 2):
            return
        mapping = _mapping(parameter)
        if mapping is not None and kind not in mapping.get_optim_state_keys():
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _moments(self) -> tuple[TensorKind, ...]:
        return ("momentum",) if "momentum" in self.optimizer.defaults else ("exp_avg", "exp_avg_sq")

    @property
    def _counts_by_group(self) -> bool:
        """Whether groups rather than parameters count steps, as in NVIDIA Apex's Adam and LARS."""
        return "step" in self.optimizer.param_groups[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, which updates this process's partition."""
        optimizer = self._engine.optimizer
        return optimizer if self._zero_stage == 0 else optimizer.optimizer

    def _masters(self) -> Iterable[Tensor]:
        """Return the tensors that the inner optimizer updates: flat partitions under ZeRO."""
        if self._zero_stage == 3:
            # DeepSpeed empties the groups of the inner optimizer between steps.
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def logical_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of this process's tensor-parallel slice, under ZeRO-3 too."""
    if not _is_split(parameter):
        return parameter.shape
    whole: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]
    return torch.Size(whole)


def set_gathered(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter that ZeRO-3 may have partitioned; all processes pass the same value."""
    if not _is_split(parameter):
        parameter.data.copy_(value)
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)


def held_elements(parameter: nn.Parameter) -> range:
    """Return the elements, in row-major order, that `set_held_elements` takes.

    Under ZeRO-3 these are this process's partition, otherwise all. They are also all if the
    partition has copies: in a parameter that is kept whole or currently gathered, within a node, or
    on NVMe.
    """
    if not _is_split(parameter):
        return range(parameter.numel())
    split: Any = parameter
    alone = (
        split.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and split.ds_tensor.status is PartitionedParamStatus.AVAILABLE
        and split.ds_tensor.final_location is None
        and split.ds_secondary_tensor is None
        and not split.ds_persist
    )
    return _partition(parameter) if alone else range(split.ds_numel)


def set_held_elements(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the elements of `held_elements`, given as a vector; without communication if possible."""
    shape = logical_shape(parameter)
    if len(values) == shape.numel():
        set_gathered(parameter, values.view(shape))
    else:
        parameter.ds_tensor[: len(values)].copy_(values)  # type: ignore[attr-defined]


def _partition(parameter: nn.Parameter) -> range:
    """Return the elements of this process's partition under ZeRO-3, without its padding."""
    split: Any = parameter
    size, whole = split.ds_tensor.ds_numel, split.ds_numel
    start = min(size * split.ds_zero_partition_rank, whole)
    return range(start, min(start + size, whole))


def _mapping(parameter: nn.Parameter) -> Any:
    """Return DeepSpeed's fragment at ZeRO 1 and 2; None if other processes update all of it."""
    return parameter._hp_mapping  # type: ignore[attr-defined]


def _is_split(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")
