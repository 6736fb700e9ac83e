"""The MLP of a block: Megatron's, with dropout inside and a recomputed activation function.

Legend: b images, s tokens, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor, nn

from megavis.model.activations import Branch, with_recomputed
from megavis.model.block_layers import block_layers
from megavis.model.dropout import SplitDropout

if TYPE_CHECKING:
    from megavis.model.core import Core


class FeedForward(MLP):
    """Megatron's MLP, with separate initializations of its two matrices and inner dropout.

    Attributes:
        recomputes: whether the activation function is recomputed in the backward pass; False with
            dropout, whose mask would differ.
    """

    def __init__(self, config: TransformerConfig, core: Core, **_: Any) -> None:
        layers = block_layers()
        submodules = MLPSubmodules(
            linear_fc1=layers.column_parallel, linear_fc2=layers.row_parallel
        )
        super().__init__(
            config,
            submodules,
            # Megatron's gated layers have all gates of a part before its values, so that a weight
            # would be laid out in another way at each tensor-parallel size.
            ffn_hidden_size=core.model.mlp_input_size,
            tp_group=core.groups.tp,
        )
        dropout = core.model.mlp_dropout
        checkpointing = core.config.parallel.activation_checkpointing
        self.recomputes = checkpointing == "selective" and not dropout
        if dropout:
            drop = SplitDropout(dropout, core.groups.tp)
            self.activation_func = nn.Sequential(_Activation(config.activation_func), drop)

    def forward(self, hidden_states: Tensor, **_: Any) -> Branch:
        """Map `[s, b, h]` to the same shape and a bias `[h]`, which the caller adds."""
        inner, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            inner = inner + bias
        # The compiler itself decides what is cheaper to recompute than to save.
        if self.recomputes and self.training and not torch.compiler.is_compiling():
            return with_recomputed(self.activation_func, inner, self.linear_fc2)
        return self.linear_fc2(self.activation_func(inner))


class _Activation(nn.Module):
    """Wraps a function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def feed_forward_type(core: Core) -> type:
    """Return `FeedForward` bound to this core.

    Megatron 0.16 builds the MLP from a class or a spec, 0.19 calls it with other keyword arguments;
    a class that ignores them works for both.
    """

    class BoundFeedForward(FeedForward):
        def __init__(self, config: TransformerConfig, **_: Any) -> None:
            super().__init__(config, core)

    return BoundFeedForward
