"""The parts of the first layer: what embeds tokens, positions and conditions.

Parts are named by their role, the same in every paper; names of parameters begin with the role.

Legend: b images, m rows, n positions, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.model.norms import Norm
from megavis.model.parameters import Fill, filled, has_partial_gradient
from megavis.parallel.random import seeded
from megavis.tokenizers.patches import to_grid, to_tokens

TRANSFORMED = "tokens"
"""Name under which a learned transform's tokens are carried to the head, which scores them."""

Role = Literal[
    "transform", "content", "positions", "asked_positions", "start", "query", "mask", "marks",
    "front", "front_position", "encoder", "sink", "row_vectors", "row_norm",
]  # fmt: skip
"""What a part is for:

- `transform`: a learned, invertible map of tokens on their grid (`forward`, `inverse`).
- `content`: embeds tokens `[b, m, ...]` to `[b, m, h]`.
- `positions`, `asked_positions`: `Positions` of content and of predicted tokens.
- `start`: a start token before the first token: a vector, or a table by class.
- `query`, `mask`: a vector that stands for a token to predict, or a hidden one.
- `marks`: two vectors `[2, h]`, which mark hidden and shown tokens.
- `front`: vectors `[num_front, h]` in front of all rows, or a map of a condition to one.
- `front_position`: a position `[h]` for the row in front, or `[num_front, h]` for several.
- `encoder`: embeds the input of an encoder, to whose output blocks attend (`EncoderInput`).
- `sink`: a row before the start token.
- `row_vectors`: vectors `[m, h]` that modulate the rows together with the condition.
- `row_norm`: a norm of all rows, applied last.
"""

PARTS: tuple[Role, ...] = get_args(Role)
"""All roles, in the order of a model's parameters."""

Part = Callable[[], nn.Module | nn.Parameter]
"""Builds a part."""

PositionRole = Literal["positions", "asked_positions"]


class Parts(nn.Module):
    """The parts of a first layer; a missing one adds nothing.

    Args:
        parts: how to build each part. Its initial weights are a function of the run's `seed` and
            its role, so that they do not depend on which other parts there are.
        dropout: of embedded tokens, in training.
    """

    def __init__(self, parts: Mapping[Role, Part], *, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.roles = tuple(role for role in PARTS if role in parts)
        for role in self.roles:
            # With one seed for the whole layer, each part would depend on the parts built before
            # it.
            with seeded(seed, "weights", f"embedding.{role}"):
                setattr(self, role, parts[role]())

    def part(self, role: Role) -> Any:
        """Return the part with this role, or None."""
        return getattr(self, role) if role in self.roles else None

    def embed_content(self, tokens: Tensor) -> Tensor:
        """Embed tokens `[b, m, ...]` as `[b, m, h]`."""
        return F.dropout(self.part("content")(tokens), self.dropout, self.training)

    def add_positions(self, hidden: Tensor, places: Tensor, role: PositionRole) -> Tensor:
        """Add absolute positions of the cells `[b or 1, m]` to `hidden` `[b, m, h]`."""
        return self.part(role)(hidden, places)

    def encoded_places(self, vectors: Tensor, places: Tensor) -> Tensor:
        """Encode the cells `[b or 1, m]` in vectors `[b or 1, m, h]`; see `Positions.encode`."""
        encoded: Tensor = self.part("positions").encode(vectors, places)
        return encoded

    def vector(self, role: Literal["query", "mask"], hidden: Tensor) -> Tensor:
        """Return a query or mask vector `[h]` in the dtype of `hidden`; zeros without a part."""
        part: Tensor | None = self.part(role)
        return hidden.new_zeros(hidden.shape[-1]) if part is None else part.to(hidden.dtype)

    def prepend_start(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Prepend the start token to `hidden`: `[b, 1 + m, h]`."""
        part = self.part("start")
        return _prepended(part(known["start"])[:, None] if "start" in known else part, hidden)

    def prepend_sink(self, hidden: Tensor) -> Tensor:
        """Prepend the row before the start token to `hidden`: `[b, 1 + m, h]`."""
        return _prepended(self.part("sink"), hidden)

    def modulation(
        self, hidden: Tensor, known: Mapping[Role, Tensor], numbers: Tensor | None
    ) -> Tensor:
        """Return the vectors that modulate the rows `hidden` `[b, m, h]`, of the same shape.

        Args:
            numbers: int64 `[b, m]`, of the rows, if they have vectors of their own.
        """
        role: Role = "front" if "front" in known else "start"
        vectors: Tensor = self.part(role)(known[role])[:, None]
        if numbers is not None:
            vectors = vectors + F.embedding(numbers, self.part("row_vectors"))
        return vectors.to(hidden.dtype).expand_as(hidden)

    def front_rows(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Return the front rows `[b, num_front, h]` in the dtype of `hidden`; 0 without a part.

        Several rows of one condition differ by their positions.
        """
        part, position = self.part("front"), self.part("front_position")
        if part is None:
            return hidden[:, :0]
        rows: Tensor = part(known["front"])[:, None] if "front" in known else part[None]
        rows = rows if position is None else rows + position
        return rows.to(hidden.dtype).expand(len(hidden), -1, -1)

    def carried(self, places: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that rotary and relative positions carry, for `Embedded.places`."""
        return self.part("positions").carried(places)

    def transformed(self, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Transform tokens on their grid `[b, d, h, w]` to `[b, n, d]`, if there is a transform.

        Returns:
            Tensors to carry to the head, which scores transformed tokens; and the tokens. Tokens
            that are `[b, n, d]` have already been transformed.
        """
        part = self.part("transform")
        if part is None:
            return {}, tokens
        tokens = tokens if tokens.ndim == 3 else to_tokens(part(tokens)).contiguous()
        return {TRANSFORMED: tokens}, tokens

    def untransformed(self, tokens: Tensor, num_rows: int) -> Tensor:
        """Apply the inverse transform to tokens `[b, n, d]` on a grid of `num_rows` rows."""
        return to_tokens(self.part("transform").inverse(to_grid(tokens, height=num_rows)))


def _prepended(row: Tensor, hidden: Tensor) -> Tensor:
    """Prepend a row that broadcasts to `[b, 1, h]` to `hidden` `[b, m, h]`, in its dtype."""
    return torch.cat([row.to(hidden.dtype).expand(len(hidden), 1, -1), hidden], dim=1)


def with_whole_norms(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a first layer, in which every process has all tokens.

    Raises:
        TypeError: it contains a norm of split tokens, whose gradients would be wrong under
            sequence parallelism by a factor of the tensor-parallel size.
    """
    layer = build()
    wrong = [
        name
        for name, part in layer.named_modules()
        if isinstance(part, Norm) and has_partial_gradient(part.weight)
    ]
    if wrong:
        raise TypeError(
            f"{', '.join(wrong)} in the first layer is a norm of split tokens, and here every"
            " process has all tokens; build it with WholeNorm(core) of model/embeddings.py"
        )
    return layer


class EmbeddingTable(nn.Module):
    """A table of learned vectors, replicated on every process."""

    def __init__(self, num_rows: int, hidden_size: int, fill: Fill) -> None:
        super().__init__()
        self.weight = filled(num_rows, hidden_size, fill=fill)

    def forward(self, index: Tensor) -> Tensor:
        """Look up int64 `[...]`: `[..., hidden_size]`."""
        return F.embedding(index, self.weight)
