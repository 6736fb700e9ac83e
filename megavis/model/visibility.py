"""Which token sees which.

A visibility is data: a kind, known when the model is built, and the tensors that the kind needs,
which travel with the hidden states. The attention module turns it into the fastest kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["causal", "full"]


@dataclass(frozen=True)
class Visibility:
    """Kind and tensors; with a cache when tokens are generated one by one."""

    kind: Kind
    cache: KeyValueCache | None = None

    def dense_mask(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the plain form that tests compare kernels with.

        Args:
            num_queries: the queries are the last `num_queries` of the keys.
            num_keys: tokens that could be seen.

        Returns:
            bool `[num_queries, num_keys]`, true where the query sees the key.
        """
        everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if self.kind == "full":
            return everything
        return everything.tril(num_keys - num_queries)


@dataclass
class KeyValueCache:
    """Keys and values of the tokens so far, for every layer of this process.

    Attributes:
        capacity: tokens that will be generated at most.
        length: tokens that every layer has stored.
    """

    capacity: int
    length: int = 0
    _stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer and return all of that layer so far.

        Args:
            layer: which layer.
            key: `[b, heads, new, head_size]`.
            value: like `key`.

        Returns:
            Keys and values `[b, heads, length + new, head_size]`.
        """
        if layer not in self._stored:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self._stored[layer] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._stored[layer]
        end = self.length + key.shape[2]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count tokens that all layers have stored."""
        self.length += num_tokens
