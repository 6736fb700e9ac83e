"""Megatron's linear layers, plain on a CPU, and with whole bias gradients.

On a GPU a process that shares its layers with no other adds biases inside the product, those too
that the caller would add: one kernel less a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megavis.model.sequence_parallel import splits_tokens


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """A linear layer split by output features, which every process of the tensor group keeps."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size]` to `[s, b, output_size / tensor size]` and a bias left over."""
        learns, alone = torch.is_grad_enabled(), self.tp_group.size() == 1
        if alone and not input_.is_cpu:
            return F.linear(input_, self.weight, self.bias), None
        if splits_tokens(self) or (learns and not input_.is_cpu):
            return super().forward(input_)
        # What Megatron does around the product serves the gradient on a GPU, and outside of
        # training it costs more than the product of a single token.
        if learns:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        if self.skip_bias_add:
            return F.linear(input_, self.weight), self.bias
        return F.linear(input_, self.weight, self.bias), None


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """A linear layer split by input features, which leaves its bias to the caller.

    Under sequence parallelism the bias is added to a part of the tokens, so its gradient is a
    partial sum; Megatron's copy region adds the parts up in the backward pass.
    """

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        # The MLP passes these three itself; attention relies on the defaults.
        options.setdefault("bias", options["config"].add_bias_linear)
        options.setdefault("input_is_parallel", True)
        options.setdefault("skip_bias_add", True)
        super().__init__(input_size, output_size, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size / tensor size]` to `[s, b, output_size]` and the bias."""
        splits = splits_tokens(self)
        if self.tp_group.size() == 1 and not input_.is_cpu:
            return F.linear(input_, self.weight, self.bias), None
        # Megatron's own forward pass reads the flag of the layer, which says what training does.
        if not splits and (input_.is_cpu or self.sequence_parallel):
            part = F.linear(input_, self.weight)
            return reduce_from_tensor_model_parallel_region(part, self.tp_group), self.bias
        output, bias = super().forward(input_)
        if bias is not None and splits:
            bias = copy_to_tensor_model_parallel_region(bias, self.tp_group)
        return output, bias
