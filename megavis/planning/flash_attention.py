"""A stand-in for a flash kernel on the meta device, for measurements of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FlashAttention(TorchFunctionMode):
    """Attention that keeps queries, keys, values, output and the softmax's sums, as on a GPU.

    On the meta device torch chooses a kernel that keeps all scores.
    """

    def begin(self, *_: Any) -> None:
        """Begin, before a module's forward pass."""
        self.__enter__()

    def end(self, *_: Any) -> None:
        """End, after it."""
        self.__exit__(None, None, None)

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            return _Attended.apply(*args, mask)
        return function(*args, **(kwargs or {}))


class _Attended(torch.autograd.Function):
    """Tensors of attention's shapes, without values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Kernels lay their output out like the queries, and take a mask in their precision.
        mixed = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        mask = None if mask is None else mask.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, sums, mask)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, _, _, mask = ctx.saved_tensors
        needed = zip((query, key, value, mask), ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(each) if needs else None for each, needs in needed)
