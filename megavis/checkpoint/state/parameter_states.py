"""A parameter's float32 weight and optimizer states, at any ZeRO stage.

DeepSpeed partitions and flattens them differently at each stage. Here a tensor is always this
process's tensor-parallel slice, gathered over the data-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from megavis.checkpoint.format.manifest import TensorKind

AVERAGE: TensorKind = "average"
"""EMA of the weights; also its key in the optimizer's state."""


class ParameterStates:
    """Read and write the training state of parameters inside a DeepSpeed engine.

    All methods are collective over the data-parallel group: call them for the same parameters.
    `averages`: the engine keeps an EMA of the weights.
    """

    def __init__(self, engine: Any, zero_stage: int, *, averages: bool = False) -> None:
        self._engine, self._zero_stage, self.averages = engine, zero_stage, averages

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

    def set(self, parameter: nn.Parameter, kind: TensorKind, value: Tensor) -> None:
        """Write the float32 slice; a weight also updates the copy in the compute precision."""
        if not parameter.requires_grad:
            set_gathered(parameter, value)
        elif self._zero_stage == 0:
            state = self._engine.optimizer.state
            target = parameter.data if kind == "weight" else state[parameter][kind]
            target.copy_(value)
        elif self._zero_stage == 3:
            self._set_local(parameter, kind, value)
        elif kind == "weight":
            value = value.to(parameter.device)
            safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)
        else:
            safe_set_full_optimizer_state(parameter, value.to(parameter.device), kind)

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

    def _set_local(self, parameter: nn.Parameter, kind: TensorKind, value: Tensor) -> None:
        # Write the local slice: DeepSpeed's setter for full tensors ignores the padding of sizes
        # that are not divisible.
        split: Any = parameter
        size = split.ds_tensor.numel()
        padding = size * split.ds_zero_partition_world_size - value.numel()
        padded = nn.functional.pad(value.flatten(), (0, padding))
        local = padded.narrow(0, size * split.ds_zero_partition_rank, size)
        if kind == "weight":
            safe_set_local_fp32_param(parameter, local)
            set_gathered(parameter, value)
        else:
            safe_set_local_optimizer_state(parameter, local, kind)

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
        # DeepSpeed's attribute of a parameter; None where another process updates all of it.
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None and kind not in mapping.get_optim_state_keys():
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _moments(self) -> tuple[TensorKind, ...]:
        return ("momentum",) if "momentum" in self.optimizer.defaults else ("exp_avg", "exp_avg_sq")

    @property
    def _counts_by_group(self) -> bool:
        """Whether groups, not parameters, have the step count: NVIDIA Apex's Adam and LARS."""
        return "step" in self.optimizer.param_groups[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, which updates this process's partition."""
        optimizer = self._engine.optimizer
        return optimizer if self._zero_stage == 0 else optimizer.optimizer

    def _masters(self) -> Iterable[Tensor]:
        """Return the tensors that the inner optimizer updates: flat partitions under ZeRO."""
        if self._zero_stage == 3:
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


def _is_split(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")
