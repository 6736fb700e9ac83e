"""Sum the gradients of replicated parameters over the tensor group, once a step.

Under sequence parallelism each process of a tensor group normalises its own tokens and adds biases
to them, so the gradients of these parameters are partial sums (`parameters.has_partial_gradient`).
"Reducing Activation Recomputation in Large Transformer Models" (section 4.2.2) describes the
layout. As in Megatron's code, they are summed at the end of a step, in one buffer, just before the
optimizer computes the norm of all gradients. By then DeepSpeed has averaged them over the
data-parallel group, and all processes of a tensor group hold the same part of a parameter.

With an offloaded optimizer, gradients leave the device in each backward pass, with their norm
already computed; they are therefore summed in the backward pass, one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
from torch import Tensor, nn

from megavis.config.section import ParallelConfig
from megavis.model.parameters import has_partial_gradient


def sum_partial_gradients(
    optimizer: Any,
    parameters: Iterable[nn.Parameter],
    parallel: ParallelConfig,
    group: dist.ProcessGroup,
) -> None:
    """Have all partial gradients of this process summed before each step of an optimizer.

    Args:
        optimizer: DeepSpeed's optimizer; at ZeRO-0 torch's, whose hooks registered later see sums.
        parameters: all parameters of this process, in the same order on the group's processes.
        group: the tensor group.
    """
    partial = [p for p in parameters if p.requires_grad and has_partial_gradient(p)]
    if not partial:
        return
    if parallel.offload_optimizer != "none":
        for parameter in partial:
            parameter.register_hook(functools.partial(_summed, group=group))
        return
    if parallel.zero_stage == 0:
        optimizer.register_step_pre_hook(
            lambda *_: _sum_in_one([p.grad for p in partial if p.grad is not None], group)
        )
        return
    if parallel.zero_stage == 3:
        add_up = _sum_of_stage_3
    elif isinstance(optimizer, BF16_Optimizer):
        add_up = _sum_of_bf16
    else:
        add_up = _sum_of_fragments
    plain: Callable[..., Any] = optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **options: Any) -> Any:
        add_up(partial, group)
        return plain(*args, **options)

    # Replace `step`: DeepSpeed's optimizers have no hooks, and compute the norm inside it.
    optimizer.step = step


def _sum_of_bf16(parameters: Sequence[Any], group: dist.ProcessGroup) -> None:
    # Every process has whole gradients.
    _sum_in_one([parameter._hp_grad for parameter in parameters], group)


def _sum_of_fragments(parameters: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Sum the parts of the gradients that ZeRO 1 and 2 keep on this process."""
    held = [parameter for parameter in parameters if parameter._hp_mapping is not None]
    _sum_in_one([p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group) for p in held], group)


def _sum_of_stage_3(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    found = [safe_get_local_grad(parameter) for parameter in parameters]
    _sum_in_one(found, group)
    for parameter, gradient in zip(parameters, found, strict=True):
        safe_set_local_grad(parameter, gradient)


def _sum_in_one(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, in one buffer."""
    if not gradients:
        return
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(buffer, group=group)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _summed(gradient: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    # A hook must not change its argument.
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
