"""Linear layers and norms of a block by NVIDIA Transformer Engine, and FP8.

Through Megatron-Core's wrappers, which draw whole weights on the CPU like Megatron's own layers.
Written for the interface of Transformer Engine 2.9.0 to 2.20.2 and of Megatron-Core 0.16.1 and
0.19.2; not run on a GPU. Imported only if `training.kernels: transformer_engine` asks for it.

FP8 scales each tensor by its own maximum ("current scaling"), so no history of maxima is part of
the training state: a recomputed block and a resumed run round as before, and nothing is reduced
over processes, except that Transformer Engine agrees on the maximum of tokens that it gathers over
the tensor group. Each part of a split matrix has its own scale, so layouts differ by rounding.

Legend: b images, s tokens, h hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    FP8GlobalStateManager,
    TEColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformer_engine.common.recipe import Float8CurrentScaling, Format
from transformer_engine.pytorch import autocast

from megavis.config.checks import FP8_MULTIPLE, check_fp8_sizes
from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.model.norms import GainNorm
from megavis.model.parameters import set_partial_gradient
from megavis.model.tensor_parallel import multiply_parts, splits_tokens


class ColumnParallelLinear(TEColumnParallelLinear):
    """A linear layer split by output features, whose output stays split.

    Like `tensor_parallel.ColumnParallelLinear`; the bias is part of the product.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **options: Any) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            gather_output=False,
            skip_bias_add=False,
            **_shared(options),
        )
        _finish(self, bias)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Map `[s, b, input_size]` to `[s, b, output_size / tensor size]`.

        Raises:
            UserError: FP8 does not support the number of rows.
        """
        if self.sequence_parallel and not splits_tokens(self):
            # Transformer Engine reads the layer's flag, which does not reflect `whole_tokens`.
            return F.linear(input_, self.weight, self.bias), None
        _require_rows(input_)
        output: tuple[Tensor, None] = super().forward(input_)
        return output


class QueryKeyValue(ColumnParallelLinear):
    """One projection to queries, keys and values, like `tensor_parallel.QueryKeyValue`.

    Parts of the weight are multiplied without Transformer Engine, and not in FP8.
    """

    def __init__(
        self, input_size: int, output_size: int, *, head_size: int, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.head_size = head_size

    def forward(  # type: ignore[override]  # a parent's layer has one input
        self, *inputs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Map all tokens, or those that read and those that are seen."""
        if len(inputs) == 1:
            return super().forward(inputs[0])
        return multiply_parts(self, *inputs)


class RowParallelLinear(TERowParallelLinear):
    """A linear layer split by input features, whose bias the caller adds.

    Like `tensor_parallel.RowParallelLinear`, also in the gradient of its bias under sequence
    parallelism.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **options: Any) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            **_shared(options),
        )
        _finish(self, bias)
        if bias and self.sequence_parallel:
            set_partial_gradient([self.bias])

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `[s, b, input_size / tensor size]` to `[s, b, output_size]` and the bias.

        Raises:
            UserError: FP8 does not support the number of rows.
        """
        if self.sequence_parallel and not splits_tokens(self):
            part = F.linear(input_, self.weight)
            return reduce_from_tensor_model_parallel_region(part, self.tp_group), self.bias
        _require_rows(input_)
        output: tuple[Tensor, Tensor | None] = super().forward(input_)
        return output


class BlockNorm:
    """Builds Transformer Engine's RMS or layer norm, with the attributes of `norms.Norm`."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> Any:
        """Build; `config.normalization` is RMSNorm or LayerNorm."""
        norm = TENorm(config, hidden_size, eps)
        norm.subtracts_mean = config.normalization == "LayerNorm"
        if not norm.subtracts_mean:
            norm.register_parameter("bias", None)
        if config.sequence_parallel:
            set_partial_gradient(norm.parameters())
        return norm


class BlockGainNorm:
    """Builds the same without bias: for layer norm our own, since Transformer Engine has none."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> Any:
        """Build; `config.normalization` is RMSNorm or LayerNorm."""
        build = GainNorm if config.normalization == "LayerNorm" else BlockNorm
        return build(config, hidden_size, eps)


def fp8(model: ModelConfig, tensor_size: int) -> Any:
    """Return a factory of the autocast context in which a stack runs in FP8.

    Raises:
        UserError: FP8 does not support the stack's sizes.
    """
    for key, text in check_fp8_sizes(model, tensor_size):
        raise UserError(f"{key.removeprefix('model.')} of a stack of blocks: {text}")
    recipe = Float8CurrentScaling(fp8_format=Format.HYBRID)
    return functools.partial(autocast, enabled=True, recipe=recipe)


def _shared(options: Mapping[str, Any]) -> dict[str, Any]:
    # Megatron's other options are fixed here, or concern kernels that are not used.
    taken = {name: options[name] for name in ("config", "init_method", "tp_group")}
    return {**taken, "is_expert": False}


def _finish(layer: Any, bias: bool) -> None:
    # The layer is not told when weights change, and would keep using the FP8 copy of its first
    # call.
    layer.disable_parameter_transpose_cache = True
    if not bias:
        # Transformer Engine sets an empty tensor; decoding, like torch, expects None.
        layer.bias = None


def _require_rows(x: Tensor) -> None:
    rows = x.shape[:-1].numel()
    if FP8GlobalStateManager.is_fp8_enabled() and rows % FP8_MULTIPLE:
        shape = " × ".join(str(size) for size in x.shape[:-1])
        raise UserError(
            f"needs a multiple of {FP8_MULTIPLE} rows in every matrix product of a"
            f" block, and one has {shape} (tokens × images); make training.micro_batch_size a"
            f" multiple of {FP8_MULTIPLE}, or set fp8 to false",
            key="training.fp8",
        )
