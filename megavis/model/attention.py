"""Multi-head attention for every visibility, with heads split over tensor and context group.

Queries, keys and values share one projection. Where they come from different tokens (two streams, a
context of some tokens, an encoder's output, a last block of which only some tokens are read), parts
of its weight are multiplied separately: keys and values are computed only for tokens that are
attended to, queries only for tokens whose output is used.

Legend: s tokens, q queries, c keys, b images, h hidden size, n heads of this process, d head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megavis.model.block_layers import block_layers
from megavis.model.context_parallel import heads_to_tokens, splits_context, tokens_to_heads
from megavis.model.kernels import (
    FEW,
    apply_rotary,
    attend_to_few,
    group_blocks,
    suits_flex,
    two_stream_attention,
)
from megavis.model.norms import Norm
from megavis.model.parameters import Fill, Initialization, set_partial_gradient
from megavis.model.positions import RelativeBias, turns
from megavis.model.tensor_parallel import to_columns
from megavis.model.visibility import (
    AttentionContext,
    Turns,
    TwoStreamMask,
    Visibility,
    VisibilityKind,
)
from megavis.parallel.random import rank_local_rng


class Attention(nn.Module):
    """Self-attention that takes an `AttentionContext` instead of Megatron's attention mask."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        initialization: Initialization,
        visibility_kind: VisibilityKind,
        rotary_scale: float = 1.0,
        relative_grid: tuple[int, int] | None = None,
        has_bias: bool = False,
        head_norm: type[Norm] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.head_size = config.hidden_size // config.num_attention_heads
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        self.rotary_scale = rotary_scale
        self.relative_bias: RelativeBias | None = None
        if relative_grid is not None:
            assert visibility_kind in ("full", "context"), "other kinds have masks of their own"
            heads = config.num_attention_heads // self.tensor_group.size()
            self.relative_bias = RelativeBias(heads, relative_grid)
        self.query_positions: nn.Module | None = None
        """Maps queries `[b, n, q, d]` to a bias of scores `[b, n, q, c]`, if set."""
        width = config.hidden_size
        layers = block_layers()
        self.multiplies_parts = layers.multiplies_parts
        options: dict[str, Any] = {
            "config": config,
            "bias": has_bias,
            "tp_group": self.tensor_group,
        }
        # Rows are ordered by `join_heads`, so that splitting them assigns complete heads to each
        # process.
        self.linear_qkv = layers.query_key_value(
            width,
            3 * width,
            init_method=_joined_fill(initialization, config.num_attention_heads),
            head_size=self.head_size,
            **options,
        )
        options["init_method"] = initialization.attention_output
        self.linear_proj = layers.row_parallel(width, width, **options)
        self.query_norm = self.key_norm = None
        if head_norm is not None:
            self.query_norm, self.key_norm = (self._norm_of_heads(head_norm) for _ in range(2))

    def _norm_of_heads(self, kind: type[Norm]) -> Norm:
        """Return a norm of queries or keys, the same for all heads."""
        norm = kind(self.config, self.head_size, self.config.layernorm_epsilon)
        # A process of the tensor group has some of the heads.
        if self.tensor_group.size() > 1:
            set_partial_gradient(norm.parameters())
        return norm

    def forward(
        self, hidden_states: Tensor, attention_mask: AttentionContext, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `[s, b, h]` (s split under sequence and context parallelism).

        Returns:
            `[q, b, h]` (q split likewise) and the output bias `[h]`, which the caller adds.
        """
        # Megatron's layer passes its mask through unchanged, so the context is passed as the mask.
        attention_context, visible = attention_mask, attention_mask.visibility.visible_tokens
        # Every process has the coordinates of all tokens, even where hidden states are split: the
        # all-to-all that gives it all tokens precedes the rotation.
        query, key, value = self._projected(hidden_states, attention_context)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
            # A view would keep the queries and keys before their norms alive.
            value = value.clone() if torch.is_grad_enabled() else value
        # From the queries before rotation.
        asked = None if self.query_positions is None else self.query_positions(query)
        bias, places = None, attention_context.coordinates
        if places is not None and self.relative_bias is not None:
            read_places = places[:, attention_context.query_start :]
            heads = self._own_heads(query.shape[1])
            bias = self.relative_bias(read_places, visible(places, dim=1), heads)
        elif places is not None:
            of_queries, of_keys = attention_context.turns or self._turns(attention_context, places)
            query, key = apply_rotary(query, *of_queries), apply_rotary(key, *of_keys)
            # A view would keep the unrotated ones alive until the backward pass.
            value = value.clone() if torch.is_grad_enabled() else value
        bias = asked if bias is None else bias if asked is None else bias + asked
        mixed = self.attend(query, key, value, attention_context, bias)
        if splits_context(self.config):
            mixed = heads_to_tokens(mixed, self.context_group)
        return self.linear_proj(mixed)

    def prepared(self, context: AttentionContext, hidden: Tensor) -> AttentionContext:
        """Return a context with the tensors that all blocks of a stack share in a step.

        For passes over whole sequences, of which `hidden` may be a part.
        """
        turns = mask = None
        if context.coordinates is not None and self.relative_bias is None:
            turns = self._turns(context, context.coordinates)
        if context.visibility.kind == "two_stream":
            num_queries = context.visibility.num_tokens - context.query_start
            # For the number of queries of a whole sequence: `hidden` may hold this process's tokens
            # alone.
            mask = self._two_stream_mask(context, num_queries, hidden)
        return replace(context, turns=turns, mask=mask)

    def _two_stream_mask(
        self, context: AttentionContext, num_queries: int, like: Tensor
    ) -> TwoStreamMask:
        """Return the mask for the last `num_queries` tokens, computed once per step."""
        visibility, once = context.visibility, context.once
        groups, of_queries = visibility.content_groups, visibility.query_groups
        assert groups is not None
        assert of_queries is not None
        if suits_flex(like, num_queries, self.head_size, self._dropout, training=self.training):
            made = once(
                f"blocks of {num_queries}",
                lambda: group_blocks(groups, visibility.reach(num_queries)),
                groups,
                of_queries,
            )
        else:
            # A dense mask disables SDPA's flash kernels, so use one only where no flag will do.
            made = once(
                f"mask of {num_queries}",
                lambda: _seen_and_blind(visibility.mask(num_queries, groups.shape[1])),
                groups,
                of_queries,
            )
        mask: TwoStreamMask = made
        return mask

    @property
    def _dropout(self) -> float:
        """Probability with which attention weights are dropped."""
        return self.config.attention_dropout if self.training else 0.0

    def _projected(self, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, ...]:
        """Return queries `[b, n, q, d]`, keys and values `[b, n, c, d]` of all tokens.

        With context parallelism, tokens are selected after the all-to-all; they are also selected
        last where the projection cannot multiply parts of its weight.
        """
        start, visible = context.query_start, context.visibility.visible_tokens
        divides = splits_context(self.config)
        selects = start > 0 or not context.visibility.is_one_stream
        if selects and self.multiplies_parts and not divides:
            whole = to_columns(hidden, self.config, self.tensor_group)
            parts = self.linear_qkv(whole[start:], visible(whole, dim=0))
            return projected_heads(parts, self.head_size)
        projected, _ = self.linear_qkv(hidden)
        if divides:
            projected = tokens_to_heads(projected, self.context_group)
        if not selects:
            return projected_heads((projected, None), self.head_size)
        query, pairs = projected.unflatten(2, (-1, 3, self.head_size)).split([1, 2], dim=3)
        chosen = query[start:].squeeze(3), *visible(pairs, dim=0).unbind(3)
        return tuple(part.permute(1, 2, 0, 3) for part in chosen)

    def _own_heads(self, count: int) -> slice:
        """Return the slice of the tensor rank's heads that this process has: `count` heads."""
        # The bias table is split by heads over the tensor group only; the context group divides
        # these heads again.
        first = count * self.context_group.rank() if splits_context(self.config) else 0
        return slice(first, first + count)

    def _turns(self, context: AttentionContext, places: Tensor) -> tuple[Turns, Turns]:
        """Return the rotations of queries and of keys, computed once per step."""
        start, visibility = context.query_start, context.visibility

        def make() -> tuple[Turns, Turns]:
            cos, sin = turns(places, self.head_size, scale=self.rotary_scale)
            seen = visibility.visible_tokens(places, dim=1)
            of_keys = (cos, sin)
            if seen is not places:
                of_keys = turns(seen, self.head_size, scale=self.rotary_scale)
            return (cos[:, :, start:], sin[:, :, start:]), of_keys

        # With a context, keys are rotated by the places of the chosen tokens, so the cache must
        # distinguish contexts.
        tensors = [places] if visibility.context is None else [places, visibility.context]
        return context.once(f"turns from {start}", make, *tensors)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_context: AttentionContext,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries `[b, n, q, d]` to keys and values `[b, n, c, d]`.

        Returns `[q, b, n · d]`, softmax(q · k / √d + bias) · v, with the bias `[b or 1, n, q, c]`
        of relative positions.
        """
        if attention_context.cache is not None:
            key, value = attention_context.cache.extend(self, key, value)
        dropout = self._dropout
        # Heads are split over the tensor group, so their dropout masks must differ.
        with rank_local_rng(self.tensor_group.rank(), self.tensor_group.size() if dropout else 1):
            if bias is None:
                mixed = self._kernel(query, key, value, attention_context, dropout)
            else:
                mixed = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=bias.to(query.dtype), dropout_p=dropout
                )
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _kernel(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, dropout: float
    ) -> Tensor:
        """Attend by the visibility's fastest kernel: `[b, n, q, d]`; other shapes as above."""
        visibility = context.visibility
        kind, num_queries, num_keys = visibility.kind, query.shape[2], key.shape[2]
        sees_all = kind in ("full", "context")
        if sees_all and num_keys <= FEW and context.cache is None and not dropout:
            return attend_to_few(query, key, value)
        # SDPA's `is_causal` aligns its mask at the top left, right only where queries and keys are
        # the same tokens. A single query is the last token and sees all keys; given tokens after a
        # cache need a mask that is aligned at the bottom right.
        if sees_all or (kind == "causal" and num_queries == 1):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        if kind == "causal" and num_queries == num_keys:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True
            )
        if kind == "causal":
            mask = visibility.mask(num_queries, num_keys)
            assert mask is not None
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask.to(query.device), dropout_p=dropout
            )
        streams = context.mask
        if streams is None:
            streams = self._two_stream_mask(context, num_queries, query)
        if isinstance(streams, BlockMask):
            return two_stream_attention(query, key, value, streams)
        seen, blind = streams
        # Fill unconditionally: branching would synchronize.
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        return mixed.masked_fill(blind, 0.0)


class CrossAttention(Attention):
    """Attention from all tokens to all of an encoder's output, the memory."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, visibility_kind="context", **options)

    # Megatron's layer passes different arguments to cross-attention than to self-attention.
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: AttentionContext,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from all `[s, b, h]` to the memory `[c, b, h]`, which every process has.

        Of the self-attention's context only the cache is used, which stores the memory's keys and
        values. Returns like self-attention, for all s tokens.
        """
        own = to_columns(hidden_states, self.config, self.tensor_group)
        cache = attention_mask.cache
        if cache is None:
            # In one call, since ZeRO-3 gathers the weight in each call.
            memory = to_columns(key_value_states, None, self.tensor_group)
            query, key, value = projected_heads(self.linear_qkv(own, memory), self.head_size)
        else:
            (query,) = _by_part(self.linear_qkv(own, None)[0], 1, self.head_size)
            key, value = cache.fixed(
                self,
                lambda: _by_part(self.linear_qkv(None, key_value_states)[1], 2, self.head_size),
            )
        # No default for `once`, whose factory a compiler cannot trace.
        seen = AttentionContext(Visibility("full"), once=attention_mask.once)
        mixed = self.attend(query, key, value, seen)
        return self.linear_proj(mixed)


def projected_heads(output: tuple[Tensor, Tensor | None], size: int) -> tuple[Tensor, ...]:
    """Split the output of `linear_qkv` into queries, keys and values by head.

    Returns:
        Queries `[b, n, q, d]`, keys and values `[b, n, c, d]`.
    """
    first, pairs = output
    if pairs is None:
        heads = first.unflatten(2, (-1, 3, size)).unbind(3)
        return tuple(part.permute(1, 2, 0, 3) for part in heads)
    return *_by_part(first, 1, size), *_by_part(pairs, 2, size)


def _by_part(projected: Tensor, parts: int, size: int) -> tuple[Tensor, ...]:
    """Split `[s, b, parts · n · d]` into `parts` tensors `[b, n, s, d]`.

    In this order, the backward pass concatenates the gradients with one copy, and with none for a
    single part.
    """
    heads = projected.unflatten(2, (parts, -1, size))
    each = heads.unbind(2) if parts > 1 else (heads.squeeze(2),)
    return tuple(part.permute(1, 2, 0, 3) for part in each)


def join_heads(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """Join the rows of three projections, weights `[n · d, h]` or biases, as in `linear_qkv`.

    Returns:
        `[3 · n · d, ...]`: head by head, each head's queries before its keys and its values, which
        is the order of Megatron's `linear_qkv`.
    """
    heads = [rows.unflatten(0, (num_heads, -1)) for rows in (query, key, value)]
    return torch.stack(heads, dim=1).flatten(0, 2)


def split_heads(rows: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Invert `join_heads`."""
    query, key, value = rows.unflatten(0, (num_heads, 3, -1)).unbind(1)
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _joined_fill(initialization: Initialization, num_heads: int) -> Fill:
    """Return a fill of the joined weight that draws queries first, then keys and values."""

    def fill(matrix: Tensor) -> None:
        heads = matrix.unflatten(0, (num_heads, 3, -1))
        # Draw separate matrices, since fills read fan-in and fan-out from the shape, and copy them,
        # since the parts alternate by head in `matrix`.
        for part, draw in (
            (heads[:, :1], initialization.query),
            (heads[:, 1:], initialization.key_value),
        ):
            drawn = torch.empty_like(part.flatten(0, 2))
            draw(drawn)
            part.copy_(drawn.view_as(part))

    return fill


def _seen_and_blind(mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a mask without empty rows `[b, 1, q, c]`, and the rows that were empty `[b, 1, q, 1]`.

    The softmax of an empty row would be 0/0. Such a query attends to everything instead, and its
    output is zeroed.
    """
    assert mask is not None
    mask = mask[:, None]
    blind = ~mask.any(dim=-1, keepdim=True)
    return mask | blind, blind
