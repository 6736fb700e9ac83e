"""Visibility: which token attends to which.

A visibility is data: a kind, known when the model is built, and the tensors that the kind needs,
which travel with the hidden states. The attention module turns it into the fastest kernel;
`dense_mask` is the plain form that tests compare kernels with.

- `causal`: a token sees itself and those before it.
- `full`: all see all.
- `two_stream`: content tokens come before query tokens, and only content is seen. A content token
  sees the groups up to its own, a query token those before its own.
- `context`: all see the tokens that `context` names, and no other.

Legend: b images (1 where all images share a tensor), s tokens, c tokens that can be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

VisibilityKind = Literal["causal", "full", "two_stream", "context"]


@dataclass(frozen=True)
class Visibility:
    """Kind and tensors.

    Attributes:
        kind: one of the table above.
        content_groups: two_stream: int64 `[b, c]`, the group of each content token.
        query_groups: two_stream: int64 `[b, q]`, the group of each query token; q may be 0.
        context: context: int64 `[b, c]`, places of the tokens that all tokens see.
    """

    kind: VisibilityKind
    content_groups: Tensor | None = None
    query_groups: Tensor | None = None
    context: Tensor | None = None

    @property
    def num_content(self) -> int:
        """Content tokens of two streams."""
        return self._groups()[0].shape[1]

    @property
    def query_start(self) -> int:
        """Place of the first token that the head reads: of two streams the first query token."""
        if self.kind != "two_stream" or self._groups()[1].shape[1] == 0:
            return 0
        return self.num_content

    def visible_tokens(self, tokens: Tensor, *, dim: int) -> Tensor:
        """Return those of `tokens` whose keys and values someone needs.

        Args:
            tokens: `[s, b, ...]` or `[b, s, ...]`.
            dim: which of the first two dimensions counts tokens; the other counts images.
        """
        if self.kind == "two_stream":
            return tokens.narrow(dim, 0, self.num_content)
        if self.kind == "context":
            return _take(tokens, self.context, dim=dim)
        return tokens

    def mask(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Return bool `[num_queries, num_keys]` or `[b, num_queries, num_keys]`; None: all see all.

        Args:
            num_queries: the queries are the last so many tokens.
            num_keys: tokens that can be seen.
        """
        if self.kind == "causal":
            everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
            return everything.tril(num_keys - num_queries)
        if self.kind == "two_stream":
            content = self._groups()[0]
            return content[:, None, :] < self.reach(num_queries)[:, :, None]
        return None

    def reach(self, num_queries: int) -> Tensor:
        """Return the first group that each of the last tokens does not see: int64 `[b, q]`.

        Of two streams: a content token sees its own group, a query token must not.
        """
        content, query = self._groups()
        return torch.cat([content + 1, query], dim=1)[:, -num_queries:]

    def _groups(self) -> tuple[Tensor, Tensor]:
        assert self.content_groups is not None
        assert self.query_groups is not None
        return self.content_groups, self.query_groups

    def dense_mask(self, num_tokens: int) -> Tensor:
        """Return who sees whom among all tokens: bool `[b, s, s]`, true where row sees column."""
        mask = torch.zeros(1, num_tokens, num_tokens, dtype=torch.bool)
        if self.kind == "causal":
            return mask.logical_not().tril()
        if self.kind == "full":
            return mask.logical_not()
        if self.kind == "two_stream":
            seen = self.mask(num_tokens, self.num_content)
            assert seen is not None
            mask = mask.repeat(len(seen), 1, 1)
            mask[:, :, : self.num_content] = seen
            return mask
        assert self.context is not None
        columns = torch.zeros(len(self.context), num_tokens, dtype=torch.bool)
        columns.scatter_(1, self.context, True)
        return columns[:, None, :].expand(-1, num_tokens, -1)


def _take(tokens: Tensor, places: Tensor | None, *, dim: int) -> Tensor:
    """Take the tokens at `places` `[b, c]` out of `[s, b, ...]` (dim 0) or `[b, s, ...]` (dim 1).

    Where `tokens` are shared by all images (b = 1), each image still takes its own.
    """
    assert places is not None
    if dim == 1:
        return _take(tokens.transpose(0, 1), places, dim=0).transpose(0, 1)
    rest = tokens.shape[2:]
    whole = tokens.expand(-1, len(places), *(-1 for _ in rest))
    index = places.t().reshape(places.shape[1], len(places), *(1 for _ in rest))
    return whole.gather(0, index.expand(-1, -1, *rest))


class OncePerStep:
    """Keeps what was made of some tensors, which all blocks of a step are given alike.

    A tensor that is another object, or was written to, is another tensor.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[list[tuple[Any, int]], Any]] = {}

    def __call__(self, name: str, make: Callable[[], Any], *tensors: Tensor) -> Any:
        """Return what `make` gives; what it gave last under this name if it was of these tensors.

        Args:
            name: of what is made, with all that it depends on besides the tensors.
            make: makes it of them.
            tensors: of which it is made.
        """
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
    """What attention has to know about tokens besides their hidden states.

    Attributes:
        visibility: who sees whom.
        coordinates: int64 `[b, s, axes]` of tokens, for rotary positions.
        cache: keys and values of earlier tokens, when sequences are generated.
        query_start: only tokens from this place on are wanted; those before only give keys and
            values.
        kept: `[p, b, 1]`, what the block's p parts are multiplied by before they are added, where
            some images leave some out: attention, MLP, cross-attention.
        once: of all blocks of a stack: tables of rotary positions, masks.
    """

    visibility: Visibility
    coordinates: Tensor | None = None
    cache: KeyValueCache | None = None
    query_start: int = 0
    kept: Tensor | None = None
    once: OncePerStep = field(default_factory=OncePerStep)

    def keep(self, added: Tensor, *, part: int) -> Tensor:
        """Return what a part of a block adds `[s, b, h]` without what images leave out."""
        return added if self.kept is None else self.kept[part].to(added.dtype) * added


@dataclass
class KeyValueCache:
    """Keys and values of the tokens so far, for every attention module of this process.

    Attributes:
        capacity: tokens that will be generated at most.
        length: tokens that every module has stored.
    """

    capacity: int
    length: int = 0
    _new: int = 0
    _stored: dict[nn.Module, Tensor] = field(default_factory=dict)
    _fixed: dict[nn.Module, Tensor] = field(default_factory=dict)

    def extend(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens of one attention module and return all of that module so far.

        Args:
            module: itself, not its number: two stacks of blocks both count from one.
            key: `[b, heads, new, head_size]`.
            value: like `key`.

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
        """Return room for all keys and values of a module: `[2, b, heads, capacity, head_size]`."""
        batch, heads, _, size = like.shape
        return like.new_empty(2, batch, heads, self.capacity, size)

    def fixed(
        self, module: nn.Module, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return what `make` gave when this module asked first: of a memory, which does not grow.

        Args:
            module: which attention module.
            make: gives keys and values `[b, heads, c, head_size]`.
        """
        if module not in self._fixed:
            self._fixed[module] = torch.stack(make())
        return self._fixed[module].unbind()

    def select(self, order: Tensor) -> None:
        """Continue other sequences: int64 `[b]`, for each new one the old one that it continues."""
        for stored in (*self._stored.values(), *self._fixed.values()):
            stored.copy_(stored[:, order])

    def advance(self) -> None:
        """Count the new tokens, once all modules have stored them."""
        self.length += self._new
