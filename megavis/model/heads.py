"""Heads, from the residual stream to predictions, and the vocabulary-parallel cross-entropy.

Legend: b images, s tokens, h hidden size, v vocabulary size, t tensor size.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from megavis.model.context_parallel import gather_context
from megavis.model.core import Core
from megavis.model.kernels import cross_entropy, vocabulary_terms
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.modulation import MODULATION, OF_NORM, Modulation, modulate
from megavis.model.norms import Norm
from megavis.model.parameters import Fill
from megavis.model.sequence_regions import own_rows
from megavis.model.tensor_parallel import ColumnParallelLinear


class Head(nn.Module):
    """Base class of the last layer of a model: the final norm and a prediction from its output.

    Features and class logits are taken from the norm, which runs once per forward pass.
    """

    norm: nn.Module

    modulation: Modulation | None

    def __init__(
        self, core: Core, norm: nn.Module, norm_name: str = "norm", *, modulates: bool = True
    ) -> None:
        """Build; the norm becomes the submodule `norm_name`.

        With `modulates`, a condition that modulates the blocks also modulates the norm's output.
        """
        super().__init__()
        self.core, self._norm_name = core, norm_name
        self.add_module(norm_name, norm)
        is_modulated = modulates and core.is_modulated
        self.modulation = Modulation(core.megatron, OF_NORM) if is_modulated else None

    @property
    def feature_norm(self) -> nn.Module:
        """The final norm."""
        return self.get_submodule(self._norm_name)

    def normed(self, state: PackedState) -> Tensor:
        """Return the final norm's output for this process's tokens, modulated: `[s, b, h]`."""
        stream = LayerState.unpack(state, self.core.carried_names)
        normed: Tensor = self.feature_norm(stream.hidden)
        if self.modulation is None:
            return normed
        return modulate(normed, *self.modulation(stream.carried[MODULATION]))


def predicting(rows: Tensor, num_skipped: int) -> Tensor:
    """Return rows `[b, s, ...]` without the leading ones that predict nothing.

    A step of generation after a KV cache has rows that predict, and no more than would be skipped.
    """
    return rows if rows.shape[1] <= num_skipped else rows[:, num_skipped:]


class VocabularyHead(Head):
    """The final norm and a projection to logits, split over the tensor group by vocabulary."""

    def __init__(
        self, core: Core, vocabulary_size: int, fill: Fill, *, has_bias: bool = False
    ) -> None:
        width, epsilon = core.megatron.hidden_size, core.megatron.layernorm_epsilon
        super().__init__(core, Norm(core.megatron, width, epsilon))
        self.linear = ColumnParallelLinear(
            core.megatron.hidden_size,
            vocabulary_size,
            config=core.megatron,
            init_method=fill,
            bias=has_bias,
            tp_group=core.groups.tp,
        )

    def forward(self, state: PackedState) -> Tensor:
        """Map `[s, b, h]` to this process's logits `[s, b, v / t]`.

        In training with context parallelism, only of its own tokens: `split_cross_entropy` gathers
        their losses.
        """
        logits: Tensor = self.linear(self.normed(state))[0]
        if self.training:
            return logits
        return gather_context(logits, self.core.megatron, self.core.groups)


def split_cross_entropy(logits: Tensor, targets: Tensor, core: Core) -> Tensor:
    """Return -log softmax(logits)[target] in float32.

    Args:
        logits: logits of this process, `[s, b, v / t]`, or of its part of the s tokens.
        targets: ids int64 `[s, b]`, the same on all processes of the tensor and context group.
        core: provides both groups.

    Returns:
        float32 `[s, b]`, in nats, of all tokens.
    """
    is_part = len(logits) < len(targets)
    if is_part:
        targets = own_rows(targets, core.groups.cp)
    group = core.groups.tp
    if group.size() == 1:
        losses = cross_entropy(logits, targets)
    elif logits.dtype == torch.float32:
        # In place: its softmax, and then the gradient, take the place of the logits.
        losses = vocab_parallel_cross_entropy(logits, targets)
    else:
        # Megatron's function would make a float32 copy of half-precision logits. Two numbers per
        # token and process are enough, and their gather is the only collective.
        terms = vocabulary_terms(logits, targets - group.rank() * logits.shape[2])
        # The backward pass selects this process's terms.
        every = gather_from_tensor_model_parallel_region(terms, group).unflatten(2, (-1, 2))
        losses = every[..., 0].logsumexp(-1) - every[..., 1].sum(-1)
    return gather_context(losses, core.megatron, core.groups) if is_part else losses


def whole_logits(logits: Tensor, core: Core) -> Tensor:
    """Gather logits over the tensor group: `[s, b, v / t]` to `[b, s, v]`."""
    return gather_from_tensor_model_parallel_region(logits, core.groups.tp).transpose(0, 1)
