"""Adafactor as the released code of UViM and GIVT has it, of whole matrices or of parts of them.

"Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (Shazeer, Stern), algorithm 4
without update clipping and relative steps; with momentum, and with a bound on β2, as in "Scaling
Vision Transformers" (Zhai et al.), section 3.4: β2 of step t is min(bound, 1 - t^-0.8).

The mean squares of a matrix are r cᵀ / mean(r), of row means r and column means c. Here that
product itself is the state, in the matrix's form: r and c are its own means, so nothing is lost,
and any ZeRO stage partitions, gathers and saves it as it does Adam's. It takes as much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavis.checkpoint.state.parameter_states import logical_shape
from megavis.parallel.tensors import partition_dimension

_EPSILON = 1e-30
"""Added to squared gradients (ε1 of the paper)."""
_EXPONENT = 0.8
_LEAST_SIDE = 32
"""Matrices with a shorter side have a mean square for each number; so has all that is no matrix."""


class Adafactor(torch.optim.Optimizer):
    """m ← β1 m + (1 - β1) g / √v; w ← w - lr · m - lr' · decay · w.

    lr' is the rate before `learning_rate_scale` of the group: the released code scales no decay. A
    group holds one parameter, or this process's part of it where ZeRO partitions it, and what
    `matrix_options` returns for it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        processes: dist.ProcessGroup | None,
        tensor: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            groups: parameters with `weight_decay`, `learning_rate_scale` and `matrix_options`.
            lr: learning rate.
            betas: the momentum's decay, and the bound of the mean squares'.
            processes: group over which ZeRO partitions parameters; None if each process has all.
            tensor: the tensor group, if it has several processes.
        """
        defaults = {"lr": lr, "betas": betas, "weight_decay": 0.0, "learning_rate_scale": 1.0}
        super().__init__(groups, defaults)
        self.processes, self.tensor = processes, tensor

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's may return the closure's loss
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step; the closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad.float(), group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (momentum, bound) = self.state[parameter], group["betas"]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind not in state:
                state[kind] = torch.zeros_like(parameter)
        # Skip a step that `GradientNorm` found not finite, like torch's own optimizers.
        taken = ~getattr(self, "found_inf", torch.zeros((), device=parameter.device)).bool()
        steps = state["step"] + taken
        decay = (1.0 - steps.clamp(min=1.0).pow(-_EXPONENT)).clamp(max=bound)
        squares = torch.lerp(gradient.square() + _EPSILON, state["exp_avg_sq"], decay)
        if group["is_factored"]:
            squares = self._product_of_means(squares, group)
        direction = gradient * squares.clamp(min=_EPSILON).rsqrt()
        mean = torch.lerp(direction, state["exp_avg"], momentum)
        rate = group["lr"]
        decayed = rate / group["learning_rate_scale"] * group["weight_decay"]
        moved = parameter - rate * mean - decayed * parameter
        changes = (
            (state["step"], steps),
            (state["exp_avg_sq"], squares),
            (state["exp_avg"], mean),
            (parameter, moved),
        )
        for old, new in changes:
            old.copy_(torch.where(taken, new, old))

    def _product_of_means(self, squares: Tensor, group: dict[str, Any]) -> Tensor:
        """Return row means times column means, over the mean of all, in the form of `squares`.

        Args:
            squares: this process's tensor-parallel slice of a matrix; or, flat, the part of the
                slice that it holds of equal parts, the last of which may be padded.
            group: of the matrix.
        """
        rows, columns = group["shape"]
        if self.processes is None:
            matrix = squares.view(rows, columns)
            means = self._means(matrix.sum(1), matrix.sum(0), group)
            return (means[0][:, None] * means[1]).view_as(squares)
        flat = squares.flatten()
        first = self.processes.rank() * flat.numel()
        places = torch.arange(first, first + flat.numel(), device=flat.device)
        inside = places < rows * columns
        places = places.clamp(max=rows * columns - 1)
        values = torch.where(inside, flat, 0.0)
        sums = flat.new_zeros(rows + columns)
        sums.index_add_(0, places // columns, values)
        sums.index_add_(0, rows + places % columns, values)
        dist.all_reduce(sums, group=self.processes)
        of_rows, of_columns = self._means(sums[:rows], sums[rows:], group)
        product = of_rows[places // columns] * of_columns[places % columns]
        return torch.where(inside, product, 0.0).view_as(squares)

    def _means(
        self, of_rows: Tensor, of_columns: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Turn the sums of a slice into row means, and column means over the mean of all."""
        rows, columns = group["shape"]
        of_rows, of_columns = of_rows / columns, of_columns / rows
        # Where the tensor group splits rows, column means are those of equal parts, and vice versa.
        whole = of_columns if group["split"] == 0 else of_rows
        if group["split"] is not None and self.tensor is not None:
            dist.all_reduce(whole, group=self.tensor)
            whole /= self.tensor.size()
        return of_rows, of_columns / whole.mean()


def matrix_options(parameter: nn.Parameter, tensor: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return how mean squares of a parameter, which ZeRO-3 may have partitioned, are computed.

    Args:
        parameter: this process's tensor-parallel slice.
        tensor: the tensor group, if it has several processes.

    Returns:
        `shape` of the slice, the dimension that is `split` over the tensor group or None, and
        whether the matrix `is_factored`.
    """
    shape, split = tuple(logical_shape(parameter)), partition_dimension(parameter)
    whole = list(shape)
    if split is not None and tensor is not None:
        whole[split] *= tensor.size()
    return {"shape": shape, "split": split, "is_factored": is_factored(tuple(whole))}


def is_factored(shape: tuple[int, ...]) -> bool:
    """Return whether mean squares are those of rows and columns."""
    return len(shape) == 2 and min(shape) >= _LEAST_SIDE
