"""Self-attention for every visibility, split over the tensor group by heads.

Queries and keys-values have projections of their own, because some papers compute queries for all
tokens and keys and values for a few.

Legend: s tokens, b images, h hidden size, n heads of this process, d head size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavis.model.init import Initialization
from megavis.model.linear import RowParallelLinear
from megavis.model.visibility import Visibility


class Attention(nn.Module):
    """Multi-head attention that takes a `Visibility` where Megatron passes its mask."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        initialization: Initialization,
        recompute: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_number, self.recompute = layer_number, recompute
        self.head_size = config.hidden_size // config.num_attention_heads
        width, tensor_group = config.hidden_size, pg_collection.tp
        self.linear_q = ColumnParallelLinear(
            width,
            width,
            config=config,
            init_method=initialization.query,
            bias=config.add_bias_linear,
            tp_group=tensor_group,
        )
        # Rows are ordered head by head, each head's keys before its values, so that cutting the
        # rows into equal parts gives whole heads to each process.
        self.linear_kv = ColumnParallelLinear(
            width,
            2 * width,
            config=config,
            init_method=initialization.key_value,
            bias=config.add_bias_linear,
            tp_group=tensor_group,
        )
        self.linear_proj = RowParallelLinear(
            width,
            width,
            config=config,
            init_method=initialization.attention_output,
            tp_group=tensor_group,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Visibility, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: `[s, b, h]` (s split over the tensor group under sequence parallelism).
            attention_mask: who sees whom.

        Returns:
            `[s, b, h]` and the output bias `[h]`, which the caller adds.
        """
        query = self._heads(self.linear_q(hidden_states)[0], 1)[0]
        key, value = self._heads(self.linear_kv(hidden_states)[0], 2)
        if self.recompute and self.training:
            mixed = checkpoint(self._attend, query, key, value, attention_mask, use_reentrant=True)
        else:
            mixed = self._attend(query, key, value, attention_mask)
        return self.linear_proj(mixed.permute(2, 0, 1, 3).flatten(2))

    def _heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Cut `[s, b, n · parts · d]` into `parts` tensors `[b, n, s, d]`."""
        heads = projected.unflatten(2, (-1, parts, self.head_size)).permute(3, 1, 2, 0, 4)
        return heads.unbind(0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Visibility) -> Tensor:
        """Mix values `[b, n, s, d]` by softmax(q · k / √d) over what is visible."""
        if visible.cache is not None:
            key, value = visible.cache.extend(self.layer_number, key, value)
        num_queries, num_keys = query.shape[2], key.shape[2]
        if visible.kind == "full" or num_queries == 1:
            return F.scaled_dot_product_attention(query, key, value)
        if num_queries == num_keys:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        # A dense mask only where a prefix joins a cache: it keeps SDPA off its flash kernels.
        mask = visible.dense_mask(num_queries, num_keys).to(query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
