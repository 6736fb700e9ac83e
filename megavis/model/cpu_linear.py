"""The matrix product of a linear layer, by the faster of torch's two CPU libraries.

On a CPU torch multiplies float32 matrices by MKL, which on processors of other makers leaves their
widest instructions unused: on an AMD EPYC 9005 it reaches 93 GFLOP/s a core and oneDNN, which torch
has on board as well, 215. No public switch of torch chooses it and keeps float32, so the operator
that torch.compile emits is called by name, and so is the one that lays out a weight in the order in
which oneDNN reads it. Wherever they do not exist, and on any other device, the product is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1 << 21
"""Multiply-adds below which MKL is faster: oneDNN takes some 25 µs to choose its kernel."""

SMALLEST_PACKED = 1 << 19
"""The same for packed weights, with which the choice is made sooner."""

_available = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map `[..., in]` with weight `[out, in]` and bias `[out]` to `[..., out]`."""
    if not _suits(inputs, weight):
        return F.linear(inputs, weight, bias)
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        # In rows: of more dimensions the operator returns a view, which nobody may write into.
        rows: Tensor = _Product.apply(inputs.flatten(0, -2), weight, bias)
        return rows.unflatten(0, inputs.shape[:-1])
    return _multiply(inputs, weight, bias)


class PackedLinear:
    """x ↦ x · weightᵀ + bias for many inputs of the same number of rows, without gradient.

    A few rows cost little but reading the weight: it is copied once into the order in which it is
    read. One row then takes as long as by MKL, eight a third.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_rows: int) -> None:
        """Copy a weight `[out, in]`; the bias is `[out]`."""
        self._bias = bias
        self._is_packed = _has_kernel(weight) and num_rows * weight.numel() >= SMALLEST_PACKED
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)
        else:
            # As `[in, out]`, which MKL reads in rows.
            self._weight = weight.t().contiguous()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map `[num_rows, in]` to `[num_rows, out]`."""
        if self._is_packed:
            return _multiply(inputs, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(inputs, self._weight)
        return torch.addmm(self._bias, inputs, self._weight)


def _suits(inputs: Tensor, weight: Tensor) -> bool:
    """True where oneDNN is worth its start; the same for all processes with the same shapes."""
    if not _has_kernel(inputs) or not _has_kernel(weight):
        return False
    return inputs.numel() * len(weight) >= SMALLEST


def _has_kernel(operand: Tensor) -> bool:
    return _available and operand.is_cpu and operand.dtype == torch.float32


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def _multiply_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ · right of `[rows, m]` and `[rows, n]`.

    oneDNN wants one of them turned over, which is a copy: the narrower one.
    """
    if left.shape[1] <= right.shape[1]:
        return _multiply(left.t(), right.t())
    return _multiply(right.t(), left.t()).t()


class _Product(torch.autograd.Function):
    """The product of rows `[n, in]` with a gradient: two more products of the same size."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = _multiply(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            of_weight = _multiply_over_rows(gradient, inputs)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_inputs, of_weight, of_bias
