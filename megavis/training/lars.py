"""LARS: steps of each matrix in proportion to its norm, for linear evaluation with large batches.

"Large Batch Training of Convolutional Networks" (You, Gitman, Ginsburg), equation 6. MAE's linear
probing, which "Denoising Autoregressive Representation Learning" follows (table 13), leaves biases
out of the scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TRUST = 1e-3
"""η of the paper."""


class LARS(torch.optim.Optimizer):
    """Momentum on g' = η ‖w‖ / (‖g‖ + β ‖w‖) · (g + β w), with β the weight decay.

    A group whose `adapts` is true holds one matrix, or this process's part of it where ZeRO splits
    it over processes; others are biases, whose steps are not scaled. A group counts its own steps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        processes: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            groups: parameters with `weight_decay` and `adapts`.
            lr: learning rate.
            momentum: decay of the running sum of steps.
            processes: over which matrices are split; None where each process has them whole.
        """
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "step": 0})
        self.processes = processes

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's may return the closure's loss
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step; the closure is not called."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        direction = gradient.to(parameter.dtype) + decay * parameter
        if group["adapts"]:
            weight, slope = self._norms(parameter, gradient)
            trust = _TRUST * weight / (slope + decay * weight)
            # A matrix of zeros, or without a gradient, takes a plain step.
            direction *= torch.where((weight > 0) & (slope > 0), trust, 1.0)
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = group["momentum"] * state["momentum"] + direction
        # What a step that `GradientNorm` found not finite leaves alone, as torch's own optimizers.
        taken = ~getattr(self, "found_inf", torch.zeros((), device=parameter.device)).bool()
        state["momentum"].copy_(torch.where(taken, momentum, state["momentum"]))
        parameter.copy_(torch.where(taken, parameter - group["lr"] * momentum, parameter))

    def _norms(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norms of a whole matrix and of its gradient: `[2]`."""
        squares = torch.stack([t.float().square().sum() for t in (parameter, gradient)])
        if self.processes is not None:
            dist.all_reduce(squares, group=self.processes)
        return squares.sqrt()
