"""For ZeRO-0: gradient norms and skipping of non-finite steps, as in DeepSpeed's other stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavis.parallel.tensors import is_first_copy


class GradientNorm:
    """Computes and clips the global gradient norm just before each optimizer step.

    A parameter partitioned over the tensor group counts with all its parts; one that every process
    of the group holds counts once. If the norm is not finite, the optimizer gets `found_inf` and
    leaves weights and moments unchanged: torch's fused ones and LARS without synchronization,
    Apex's through `optimizer.skipping`.

    Attributes:
        value: the norm of the last step, before clipping, on the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model_group: dist.ProcessGroup, clip: float
    ) -> None:
        self.value: Tensor = torch.zeros(())
        self._group, self._clip = model_group, clip
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        counted = [p.grad for p in parameters if p.grad is not None and is_first_copy(p)]
        device = parameters[0].device
        total = torch.zeros((), device=device)
        if counted:
            total = torch.stack([g.float().pow(2).sum() for g in counted]).sum()
        dist.all_reduce(total, group=self._group)
        self.value = total.sqrt()
        # Optimizers read this attribute, which their type does not declare.
        optimizer.found_inf = (~self.value.isfinite()).float()  # type: ignore[attr-defined]
        if self._clip:
            scale = (self._clip / (self.value + 1e-6)).clamp(max=1.0)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
