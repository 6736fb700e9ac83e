"""Tensor- and sequence-parallel building blocks.

`gather_tokens` and `scatter_tokens` gather and split sequences under sequence parallelism. The
linear layers are Megatron's with two changes: plain matrix products on a CPU; and, on a GPU without
tensor parallelism, biases fused into the product, even those that the caller would add.

Legend: b images, s tokens, h hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megavis.model.parameters import set_partial_gradient
from megavis.model.sequence_regions import gather, gathered_linear, scatter, sum_and_scatter

# A context variable, like gradient mode, since callers of Megatron's linear layers pass only hidden
# states.
_WHOLE: ContextVar[bool] = ContextVar("tokens are whole", default=False)


class SequenceParallelConfig(Protocol):
    """A layer or config with a flag for sequence parallelism."""

    @property
    def sequence_parallel(self) -> bool:
        """True if sequences are split over the tensor group."""


@contextlib.contextmanager
def whole_tokens() -> Iterator[None]:
    """Disable sequence and context parallelism inside the block.

    For forward passes without gradient over sequences that cannot be split, such as a single token.
    Layers and configs are not changed; layers call `splits_tokens`.
    """
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def are_whole() -> bool:
    """Return whether this is inside `whole_tokens`, where nothing is compiled."""
    return not torch.compiler.is_compiling() and _WHOLE.get()


def splits_tokens(layer: SequenceParallelConfig) -> bool:
    """Return whether sequences are split over the tensor group in this forward pass."""
    return layer.sequence_parallel and not are_whole()


def gather_tokens(
    hidden: Tensor, config: SequenceParallelConfig, group: dist.ProcessGroup
) -> Tensor:
    """All-gather the tokens of `[s, b, h]` if they are split.

    Gradients of the result must be equal on all processes, as they are for layers that begin with
    Megatron's copy region; the backward pass selects this process's tokens.
    """
    return gather(hidden, group, sums=False) if splits_tokens(config) else hidden


def to_columns(
    hidden: Tensor, config: SequenceParallelConfig | None, group: dist.ProcessGroup
) -> Tensor:
    """Return all tokens of `[s, b, h]`, for products with parts of a column-parallel weight.

    The backward pass adds up the gradients of the tensor group. `config` is None for tokens that
    are never split.
    """
    if config is not None and splits_tokens(config):
        return gather(hidden, group, sums=True)
    return hidden if group.size() == 1 else copy_to_tensor_model_parallel_region(hidden, group)


def fuses_bias(tensor: Tensor) -> bool:
    """Return whether a bias is fused into a matrix product whose output needs no reduction."""
    return not tensor.is_cpu or torch.compiler.is_compiling()


def scatter_tokens(
    hidden: Tensor, config: SequenceParallelConfig, group: dist.ProcessGroup
) -> Tensor:
    """Return this process's tokens of `[s, b, h]`; s must be divisible by the tensor size."""
    return scatter(hidden, group) if splits_tokens(config) else hidden


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """A linear layer split by output features, whose output stays split."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size]` to `[s, b, output_size / tensor size]` and a bias not added."""
        learns = torch.is_grad_enabled()
        if self.tp_group.size() == 1 and fuses_bias(input_):
            return F.linear(input_, self.weight, self.bias), None
        if torch.compiler.is_compiling():
            if splits_tokens(self):
                return gathered_linear(input_, self.weight, self.bias, self.tp_group), None
            whole = to_columns(input_, None, self.tp_group)
            return F.linear(whole, self.weight, self.bias), None
        if splits_tokens(self) or (learns and not input_.is_cpu):
            return super().forward(input_)
        # Megatron's forward pass is designed for gradients on a GPU; outside training its overhead
        # exceeds the product of a single token.
        if learns:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        if self.skip_bias_add:
            return F.linear(input_, self.weight), self.bias
        return F.linear(input_, self.weight, self.bias), None


class QueryKeyValue(ColumnParallelLinear):
    """One projection to queries, keys and values, in the order of `attention.join_heads`."""

    def __init__(
        self, input_size: int, output_size: int, *, head_size: int, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.head_size = head_size

    def forward(  # type: ignore[override]  # a parent's layer has one input
        self, *inputs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Map `[s, b, h]` like any column-parallel layer, or two inputs by parts of the weight.

        With two inputs, both from `to_columns`, the first, `[q, b, h]`, gives queries
        `[q, b, n · d]`, and the second, `[c, b, h]`, the keys of all heads, then their values,
        `[c, b, 2n · d]`; None gives None.
        """
        if len(inputs) == 1:
            return super().forward(inputs[0])
        return multiply_parts(self, *inputs)


def multiply_parts(
    layer: Any, reading: Tensor | None, seen: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return queries of `reading`, and keys and values of `seen`; see `QueryKeyValue`."""
    weight, bias, size = layer.weight, layer.bias, layer.head_size
    if reading is not None and seen is not None and not torch.compiler.is_compiling():
        query, pairs = _Parts.apply(reading, seen, weight, bias, size)
        return query, pairs
    # For a single input, without gradients, or in a compiled block, whose graph saves no copies.
    products = zip((reading, seen), _parts(weight, size), _parts(bias, size), strict=True)
    query, pairs = (None if rows is None else F.linear(rows, *part) for rows, *part in products)
    return query, pairs


class _Parts(torch.autograd.Function):
    """Products with two parts of a weight, without saving copies of the parts."""

    @staticmethod
    def forward(
        ctx: Any, reading: Tensor, seen: Tensor, weight: Tensor, bias: Tensor | None, size: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(reading, seen, weight)
        ctx.size = size
        query, pairs = zip((reading, seen), _parts(weight, size), _parts(bias, size), strict=True)
        return F.linear(*query), F.linear(*pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *inputs, weight = ctx.saved_tensors
        size, needed = ctx.size, ctx.needs_input_grad
        slopes = [
            gradient @ part if needs else None
            # `needed` has an entry for each argument of `forward`, of which the first two are
            # inputs.
            for gradient, part, needs in zip(gradients, _parts(weight, size), needed, strict=False)
        ]
        rows = [gradient.flatten(0, 1) for gradient in gradients]
        of_weight = of_bias = None
        # Both parts are written to one tensor, which is then brought into the weight's order.
        if needed[2]:
            of_weight = torch.empty_like(weight)
            for each, x, part in zip(rows, inputs, _thirds(of_weight), strict=True):
                torch.mm(each.t(), x.flatten(0, 1), out=part)
            of_weight = _by_heads(of_weight, size)
        if needed[3]:
            of_bias = weight.new_empty(len(weight))
            for each, part in zip(rows, _thirds(of_bias), strict=True):
                torch.sum(each, 0, out=part)
            of_bias = _by_heads(of_bias, size)
        return *slopes, of_weight, of_bias, None


def _parts(rows: Tensor | None, size: int) -> tuple[Any, Any]:
    """Return the rows of a weight or bias for queries, and for keys and then values; one copy."""
    if rows is None:
        return None, None
    return _thirds(rows.unflatten(0, (-1, 3, size)).transpose(0, 1).flatten(0, 2))


def _thirds(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first third of the rows, and the rest."""
    third = len(rows) // 3
    return rows[:third], rows[third:]


def _by_heads(rows: Tensor, size: int) -> Tensor:
    """Return rows for queries, keys and values in the order of `attention.join_heads`."""
    return rows.unflatten(0, (3, -1, size)).transpose(0, 1).flatten(0, 2)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """A linear layer split by input features, whose bias the caller adds.

    Under sequence parallelism each process adds the bias to some of the tokens, so its gradient is
    a partial sum; `training/partial_gradients.py` adds them up.
    """

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        # The MLP passes these three itself; attention relies on the defaults.
        options.setdefault("bias", options["config"].add_bias_linear)
        options.setdefault("input_is_parallel", True)
        options.setdefault("skip_bias_add", True)
        super().__init__(input_size, output_size, **options)
        if self.bias is not None and self.sequence_parallel:
            set_partial_gradient([self.bias])

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size / tensor size]` to `[s, b, output_size]` and the bias."""
        if self.tp_group.size() == 1 and fuses_bias(input_):
            return F.linear(input_, self.weight, self.bias), None
        if torch.compiler.is_compiling() and self.sequence_parallel:
            part = F.linear(input_, self.weight)
            return sum_and_scatter(part, self.tp_group), self.bias
        # Megatron's forward pass reads the layer's flag, which does not reflect `whole_tokens`.
        plainly = input_.is_cpu or self.sequence_parallel or torch.compiler.is_compiling()
        if not splits_tokens(self) and plainly:
            part = F.linear(input_, self.weight)
            return reduce_from_tensor_model_parallel_region(part, self.tp_group), self.bias
        return super().forward(input_)


Precision = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context in which a block runs."""
