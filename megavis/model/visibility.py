"""Visibility: which token attends to which, and the inputs of attention besides hidden states.

A visibility consists of a kind, fixed when the model is built, and the tensors that this kind
needs, which are carried with the hidden states. The attention module maps it to the fastest kernel.

- `causal`: a token attends to itself and to earlier tokens.
- `full`: all tokens attend to all.
- `two_stream`: content tokens come before query tokens, and only content is attended to. A content
  token attends to the groups up to its own, a query token to those before its own.
- `context`: all tokens attend to those in `context` only.

Legend: b images (1 if all images share a tensor), s tokens, q query tokens, c tokens that are
attended to, p branches of a block, h hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

VisibilityKind = Literal["causal", "full", "two_stream", "context"]

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, `[b or 1, 1, s, d / 2]`."""

TwoStreamMask = BlockMask | tuple[Tensor, Tensor]
"""A mask of FlexAttention; or a dense one without empty rows `[b, 1, q, c]`, and the rows that were
empty `[b, 1, q, 1]`."""


@dataclass(frozen=True)
class Visibility:
    """A visibility kind and its tensors.

    Attributes:
        content_groups: for `two_stream`, int64 `[b, c]`, the group of each content token.
        query_groups: for `two_stream`, int64 `[b, q]`, the group of each query token; q may be 0.
        context: for `context`, int64 `[b, c]`, the indices of the tokens that are attended to.
    """

    kind: VisibilityKind
    content_groups: Tensor | None = None
    query_groups: Tensor | None = None
    context: Tensor | None = None

    @property
    def num_content(self) -> int:
        """Number of content tokens of two streams."""
        return self._groups()[0].shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of two streams."""
        return sum(groups.shape[1] for groups in self._groups())

    @property
    def query_start(self) -> int:
        """Index of the first token that the head reads: with two streams the first query token."""
        if self.kind != "two_stream" or self._groups()[1].shape[1] == 0:
            return 0
        return self.num_content

    @property
    def is_one_stream(self) -> bool:
        """Whether all tokens attend and are attended to."""
        if self.kind == "two_stream":
            return self._groups()[1].shape[1] == 0
        return self.kind != "context"

    def visible_tokens(self, tokens: Tensor, *, dim: int) -> Tensor:
        """Return the tokens attended to, of `[s, b, ...]` (`dim` 0) or `[b, s, ...]` (1)."""
        if self.kind == "two_stream":
            return tokens.narrow(dim, 0, self.num_content)
        if self.kind == "context":
            return _take(tokens, self.context, dim=dim)
        return tokens

    def mask(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Return a mask, true where a query (one of the last tokens) attends to a key.

        bool `[num_queries, num_keys]` or `[b, num_queries, num_keys]`; None if all do.
        """
        if self.kind == "causal":
            everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
            return everything.tril(num_keys - num_queries)
        if self.kind == "two_stream":
            content = self._groups()[0]
            return content[:, None, :] < self.reach(num_queries)[:, :, None]
        return None

    def reach(self, num_queries: int) -> Tensor:
        """Return the first group that each of the last tokens does not attend to: int64 `[b, q]`.

        For two streams: a content token attends to its own group, a query token does not.
        """
        content, query = self._groups()
        return torch.cat([content + 1, query], dim=1)[:, -num_queries:]

    def _groups(self) -> tuple[Tensor, Tensor]:
        assert self.content_groups is not None
        assert self.query_groups is not None
        return self.content_groups, self.query_groups


def _take(tokens: Tensor, places: Tensor | None, *, dim: int) -> Tensor:
    """Gather the tokens at `places` `[b, c]` from `[s, b, ...]` (dim 0) or `[b, s, ...]` (dim 1).

    Tokens shared by all images (b = 1) are expanded.
    """
    assert places is not None
    if dim == 1:
        return _take(tokens.transpose(0, 1), places, dim=0).transpose(0, 1)
    rest = tokens.shape[2:]
    whole = tokens.expand(-1, len(places), *(-1 for _ in rest))
    index = places.t().reshape(places.shape[1], len(places), *(1 for _ in rest))
    return whole.gather(0, index.expand(-1, -1, *rest))


class OncePerStep:
    """Caches values computed from tensors that all blocks of a step share.

    A value is recomputed if a tensor is a different object or was modified in place.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[list[tuple[Any, int]], Any]] = {}

    def __call__(self, name: str, make: Callable[[], Any], *tensors: Tensor) -> Any:
        """Return the cached value for these tensors, or compute it.

        The name must include all that it depends on besides the tensors.
        """
        # Compare objects rather than addresses, which the allocator reuses. Weak references keep
        # tensors of earlier steps from staying alive.
        known, made = self._made.get(name, ([], None))
        if len(known) == len(tensors) and all(
            seen() is tensor and version == tensor._version
            for (seen, version), tensor in zip(known, tensors, strict=True)
        ):
            return made
        made = make()
        self._made[name] = ([(weakref.ref(t), t._version) for t in tensors], made)
        return made


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of attention besides hidden states.

    Attributes:
        coordinates: int64 `[b, s, axes]` of tokens, for rotary and relative positions.
        cache: KV cache of earlier tokens, in generation.
        query_start: compute outputs only for tokens from this index on; earlier ones only provide
            keys and values.
        kept: `[p, b, 1]`, drop path factors of attention, MLP and cross-attention; None without.
        once: cache of masks and rotary tables, shared by the blocks of a stack.
        turns: rotations of queries and of keys, if they were computed before.
        mask: mask of two streams, if it was computed before; see `Attention.prepared`.
    """

    visibility: Visibility
    coordinates: Tensor | None = None
    cache: KeyValueCache | None = None
    query_start: int = 0
    kept: Tensor | None = None
    once: OncePerStep = field(default_factory=OncePerStep)
    turns: tuple[Turns, Turns] | None = None
    mask: TwoStreamMask | None = None

    def keep(self, added: Tensor, *, part: int) -> Tensor:
        """Apply drop path to the output `[s, b, h]` of a branch."""
        # In the branch's dtype: a float32 factor would promote the residual stream.
        return added if self.kept is None else self.kept[part].to(added.dtype) * added


@dataclass
class KeyValueCache:
    """KV cache of every attention module on this process.

    Attributes:
        length: number of tokens that every module has stored.
    """

    capacity: int
    length: int = 0
    _new: int = 0
    _stored: dict[nn.Module, Tensor] = field(default_factory=dict)
    _fixed: dict[nn.Module, Tensor] = field(default_factory=dict)

    def extend(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of an attention module, and return all of them.

        Args:
            module: the module, since layer numbers of two stacks coincide.
            key: `[b, heads, new, head_size]`; `value` likewise.

        Returns:
            Keys and values `[b, heads, length + new, head_size]`.
        """
        if module not in self._stored:
            self._stored[module] = self._room(module, key)
        stored = self._stored[module]
        keys, values = stored[0], stored[1]
        self._new = key.shape[2]
        end = self.length + self._new
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def _room(self, module: nn.Module, like: Tensor) -> Tensor:
        """Allocate the cache of a module: `[2, b, heads, capacity, head_size]`."""
        batch, heads, _, size = like.shape
        return like.new_empty(2, batch, heads, self.capacity, size)

    def fixed(
        self, module: nn.Module, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return keys and values `[b, heads, c, head_size]` of a memory, made once per module."""
        if module not in self._fixed:
            self._fixed[module] = torch.stack(make())
        return self._fixed[module].unbind()

    def select(self, order: Tensor) -> None:
        """Reorder the sequences: new sequence i continues the old sequence `order[i]`."""
        for stored in (*self._stored.values(), *self._fixed.values()):
            # In place, since views and CUDA graphs refer to this memory; indexing makes a copy
            # first, so an old sequence may be continued twice.
            stored.copy_(stored[:, order])

    def keep(self, length: int) -> None:
        """Forget the tokens after the first `length`, if there are any."""
        self.length = min(self.length, length)

    def advance(self) -> None:
        """Add the new tokens to `length`, after all modules have stored them."""
        self.length += self._new
