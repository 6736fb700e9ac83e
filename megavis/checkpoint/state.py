"""A parameter's float32 weight and optimizer states, at any ZeRO stage.

DeepSpeed splits and flattens them in its own ways. Here each parameter is this process's
tensor-parallel slice, whole over the data-parallel group.
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

from megavis.checkpoint.manifest import Kind


class ParameterStates:
    """Reads and writes the training state of parameters inside a DeepSpeed engine.

    All processes of a data-parallel group call the same methods for the same parameters.
    """

    def __init__(self, engine: Any, zero_stage: int) -> None:
        self._engine, self._zero_stage = engine, zero_stage

    def get(self, parameter: nn.Parameter, kind: Kind) -> Tensor:
        """Return the float32 slice; for moments that do not exist yet, zeros."""
        value: Tensor | None
        if self._zero_stage == 0:
            state = self._engine.optimizer.state.get(parameter, {})
            value = parameter.detach() if kind == "weight" else state.get(kind)
        elif kind == "weight":
            value = safe_get_full_fp32_param(parameter)
        elif not self._has_moments():
            value = None
        else:
            value = safe_get_full_optimizer_state(parameter, kind)
        if value is None:
            return torch.zeros(logical_shape(parameter), dtype=torch.float32)
        return value.float()

    def set(self, parameter: nn.Parameter, kind: Kind, value: Tensor) -> None:
        """Write the float32 slice; a weight also refreshes what the forward pass uses."""
        if self._zero_stage == 0:
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

    def _set_local(self, parameter: nn.Parameter, kind: Kind, value: Tensor) -> None:
        # Through the local slice: DeepSpeed's whole-tensor setter cuts the value without the
        # padding that odd sizes get.
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
        """Return how many steps Adam has taken."""
        adam = self._adam()
        for state in adam.state.values():
            if "step" in state:
                return int(state["step"])
        return int(adam.param_groups[0].get("step", 0))

    def create_moments(self, optimizer_step: int) -> None:
        """Make Adam's states exist, with a step count, before they can be set."""
        adam = self._adam()
        for master in self._masters():
            state = adam.state[master]
            state["step"] = torch.tensor(float(optimizer_step), device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        for group in adam.param_groups:
            if "step" in group:  # NVIDIA Apex counts by group.
                group["step"] = optimizer_step
        if self._zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _has_moments(self) -> bool:
        return any("exp_avg" in state for state in self._adam().state.values())

    def _adam(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        return optimizer if self._zero_stage == 0 else optimizer.optimizer

    def _masters(self) -> Iterable[Tensor]:
        """Return the tensors that Adam itself steps: flat partitions under ZeRO."""
        if self._zero_stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._adam().param_groups for p in group["params"]]


def logical_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of this process's tensor-parallel slice, also under ZeRO-3."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def set_gathered(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy into a parameter that ZeRO-3 may have split; every process has the same value."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(value)
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)
