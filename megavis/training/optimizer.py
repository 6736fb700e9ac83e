"""Adam, its parameter groups and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megavis.config.errors import UserError
from megavis.config.schema import OptimizerConfig, ScheduleConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return decoupled-decay Adam over the parameters.

    Raises:
        UserError: when NVIDIA Apex is asked for and absent.
    """
    groups = parameter_groups(named_parameters, config.weight_decay)
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
    }
    if config.implementation == "apex":
        return _apex_adam(groups, options)
    return torch.optim.AdamW(groups, fused=True, **options)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters by weight decay: matrices of linear layers decay, all others do not."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        is_matrix = name.endswith("weight") and ".linear" in name
        (decayed if is_matrix and weight_decay else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _apex_adam(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    # The exact submodule: the package that PyPI calls apex is an unrelated web toolkit.
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        raise UserError(
            "optimizer.implementation: apex needs NVIDIA Apex, which is not installed;"
            " use torch, or install Apex from NVIDIA's sources"
        ) from None
    return FusedAdam(groups, adam_w_mode=True, **options)


def learning_rate(step: int, *, peak: float, total_steps: int, config: ScheduleConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then cosine to 0 or constant.

    The rate of the first step is peak / warmup_steps and that of step `warmup_steps` is the peak.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return peak
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
