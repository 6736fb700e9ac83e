"""Adafactor as in the released code of UViM and GIVT, for whole matrices or parts of them.

"Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (Shazeer, Stern), algorithm 4
without update clipping and relative steps; with momentum, and with a bound on β2, as in "Scaling
Vision Transformers" (Zhai et al.), section 3.4: β2 of step t is min(bound, 1 - t^-0.8).

The mean squares of a matrix are r cᵀ / mean(r), with row means r and column means c. Here the state
is this product, in the shape of the matrix. Its row and column means are r and c, so no information
is lost, and any ZeRO stage partitions, gathers and saves it like Adam's state, in as much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavis.checkpoint.state.parameter_states import logical_shape
from megavis.model.parameters import partition_dimension

_EPSILON = 1e-30
"""Added to squared gradients (ε1 of the paper)."""
_EXPONENT = 0.8
# `min_dim_size_to_factor` of big_vision's `scale_by_adafactor`; optax's own default is 128.
_LEAST_SIDE = 32
"""Matrices with a shorter side, and tensors that are not matrices, are not factored."""


@dataclass(frozen=True)
class Slice:
    """A process's tensor-parallel slice of a parameter.

    Attributes:
        shape: shape of the slice.
        split: dimension that is split over the tensor group, or None.
        is_factored: whether mean squares are kept only for rows and columns.
        part: number of elements that ZeRO-3 gives to each process, the last of which may be
            padding; None at other stages.
    """

    shape: tuple[int, ...]
    split: int | None
    is_factored: bool
    part: int | None

    @classmethod
    def of(cls, parameter: nn.Parameter, tensor: dist.ProcessGroup | None) -> Slice:
        """Describe a parameter, which ZeRO-3 may have partitioned.

        Args:
            parameter: this process's tensor-parallel slice.
            tensor: the tensor group, if it has several processes.
        """
        shape, split = tuple(logical_shape(parameter)), partition_dimension(parameter)
        whole = list(shape)
        if split is not None and tensor is not None:
            whole[split] *= tensor.size()
        part = parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else None
        return cls(shape, split, is_factored(tuple(whole)), part)


@dataclass(frozen=True)
class HeldPart:
    """The elements of a slice that a process holds.

    Attributes:
        own: the slice.
        offset: their offset in the process's part of the group.
        first: index of the first element in the slice.
        count: number of elements.
    """

    own: Slice
    offset: int
    first: int
    count: int

    @property
    def within(self) -> slice:
        """The range of the elements in the process's part."""
        return slice(self.offset, self.offset + self.count)

    def rows_and_columns(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return row and column of each element."""
        places = torch.arange(self.first, self.first + self.count, device=device)
        columns = self.own.shape[1]
        return places // columns, places % columns


def held_parts(slices: Sequence[Slice], length: int, rank: int) -> Iterator[HeldPart]:
    """Yield the elements that a process holds of each slice of a group.

    ZeRO-1 and 2 concatenate all slices and cut the result into equal parts; ZeRO-3 cuts each slice.

    Args:
        length: elements in the process's part.
    """
    start, offset = 0, 0
    for each in slices:
        stop = start + prod(each.shape)
        if each.part is None:
            low, high = max(start, rank * length), min(stop, (rank + 1) * length)
            yield HeldPart(each, low - rank * length, low - start, max(0, high - low))
        else:
            first = rank * each.part
            yield HeldPart(each, offset, first, max(0, min(each.part, stop - start - first)))
            offset += each.part
        start = stop


class Adafactor(torch.optim.Optimizer):
    """m ← β1 m + (1 - β1) g / √v; w ← w - lr · m - lr' · decay · w.

    lr' is the rate before the group's `learning_rate_scale`: the released code does not scale
    decay. A group has a `Slice` for each of its parameters. It holds the parameters themselves, or
    this process's part of all of them if ZeRO partitions the group.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        processes: dist.ProcessGroup | None,
        tensor: dist.ProcessGroup | None,
        device: torch.device | None,
    ) -> None:
        """Set up.

        Args:
            groups: parameters with `weight_decay`, `learning_rate_scale` and `slices`.
            betas: the momentum's decay, and the bound of the mean squares'.
            processes: group over which ZeRO partitions parameters; None if each process has all.
            tensor: the tensor group, if it has several processes.
            device: device for sums over processes, from which states may be offloaded; None: the
                device of the states.
        """
        super().__init__(groups, {"lr": lr, "betas": betas})
        self.processes, self.tensor, self.device = processes, tensor, device

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's may return the closure's loss
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step; the closure is not called."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    own = (
                        group["slices"] if self.processes else group["slices"][number : number + 1]
                    )
                    self._move(parameter, parameter.grad.float(), group, own)

    def _move(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], slices: Sequence[Slice]
    ) -> None:
        state, (momentum, bound) = self.state[parameter], group["betas"]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind not in state:
                state[kind] = torch.zeros_like(parameter)
        # Like torch's optimizers, skip a step that `GradientNorm` found non-finite, and take every
        # step if `found_inf` is not set.
        taken = ~getattr(self, "found_inf", torch.zeros((), device=parameter.device)).bool()
        steps = state["step"] + taken
        # The power is infinite at 0, where the count stays while all steps have been skipped.
        decay = (1.0 - steps.clamp(min=1.0).pow(-_EXPONENT)).clamp(max=bound)
        # Average before factoring again: means are linear, so row and column means become the
        # averages that the paper keeps.
        squares = torch.lerp(gradient.square() + _EPSILON, state["exp_avg_sq"], decay)
        squares = self._factored(squares, slices)
        # The product of a row's and a column's mean may underflow to 0.
        direction = gradient * squares.clamp(min=_EPSILON).rsqrt()
        # No bias correction: big_vision's `optax.ema` has `debias=False`.
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

    def _factored(self, squares: Tensor, slices: Sequence[Slice]) -> Tensor:
        """Replace each matrix by row means times column means, divided by the mean of all.

        Args:
            squares: squares of a slice; or, flat, this process's part of several slices, with
                padding at the end.
            slices: descriptions of the slices.
        """
        if self.processes is None:
            (own,) = slices
            if not own.is_factored:
                return squares
            rows, columns = self._means(squares.sum(1), squares.sum(0), own)
            return rows[:, None] * columns
        flat = squares.flatten().clone()
        everything = held_parts(slices, flat.numel(), self.processes.rank())
        held = [each for each in everything if each.own.is_factored]
        if not held:
            return squares
        places = [each.rows_and_columns(flat.device) for each in held]
        sums = []
        for each, of_number in zip(held, places, strict=True):
            for side, index in zip(each.own.shape, of_number, strict=True):
                sums.append(flat.new_zeros(side).index_add_(0, index, flat[each.within]))
        # One collective for all matrices of the group.
        whole = sum_over(self.processes, torch.cat(sums), self.device).split(
            [len(each) for each in sums]
        )
        of_sides = zip(held, places, whole[::2], whole[1::2], strict=True)
        for each, (row, column), of_rows, of_columns in of_sides:
            rows, columns = self._means(of_rows, of_columns, each.own)
            flat[each.within] = rows[row] * columns[column]
        return flat.view_as(squares)

    def _means(self, of_rows: Tensor, of_columns: Tensor, own: Slice) -> tuple[Tensor, Tensor]:
        """Turn the sums of a slice into row means, and column means divided by the mean of all."""
        rows, columns = own.shape
        of_rows, of_columns = of_rows / columns, of_columns / rows
        if own.split is not None and self.tensor is not None:
            # If rows are split, column means average equal parts, and vice versa.
            if own.split == 0:
                of_columns = sum_over(self.tensor, of_columns, self.device) / self.tensor.size()
            else:
                of_rows = sum_over(self.tensor, of_rows, self.device) / self.tensor.size()
        whole = of_columns if own.split == 0 else of_rows
        return of_rows, of_columns / whole.mean()


def sum_over(group: dist.ProcessGroup, values: Tensor, device: torch.device | None) -> Tensor:
    """Return the sum over a group, which may not support the device of the values.

    Args:
        device: where to compute the sum; None uses the device of the values.
    """
    total = values if device is None else values.to(device)
    dist.all_reduce(total, group=group)
    return total.to(values.device)


def is_factored(shape: tuple[int, ...]) -> bool:
    """Return whether mean squares are kept only for rows and columns."""
    return len(shape) == 2 and min(shape) >= _LEAST_SIDE
