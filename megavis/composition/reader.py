"""The first layer of every paper: named parts that embed tokens, positions and conditions.

The key of a part is its parameters' name, and parts are built in the order of the keys, so that
names and initial weights are the paper's own choice.

Legend: b images, m rows, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.asking import Asking
from megavis.model.core import MEMORY, Core
from megavis.model.embeddings import to_stream
from megavis.model.init import Fill, filled
from megavis.model.layer_state import LayerState, PackedState, as_bits
from megavis.tokenizers.patches import to_grid, to_tokens

Role = Literal[
    "content", "positions", "asked_positions", "start", "query", "mask", "front", "transform",
    "memory",
]  # fmt: skip
"""What a part is for:

- `content`: embeds tokens `[b, m, ...]` to `[b, m, h]`.
- `positions`, `asked_positions`: `Positions` of content and of what is asked for.
- `start`: a vector, or a table by class, in place of a token before the first.
- `query`, `mask`: a vector in place of a token that is asked for, or hidden.
- `front`: vectors in front of all rows, or a map of a condition to one.
- `transform`: a learned, invertible map of tokens on their grid (`forward`, `inverse`).
- `memory`: embeds what an encoder reads, whose output blocks attend to (`EncoderInput`).
"""


PositionRole = Literal["positions", "asked_positions"]


@dataclass(frozen=True)
class Slot:
    """A part of the first layer that is not built yet."""

    role: Role
    build: Callable[[], nn.Module | nn.Parameter]


class Rows(nn.Module):
    """A table of learned vectors, whole on every process."""

    def __init__(self, num_rows: int, hidden_size: int, fill: Fill) -> None:
        super().__init__()
        self.weight = filled(num_rows, hidden_size, fill=fill)

    def forward(self, index: Tensor) -> Tensor:
        """Look up int64 `[...]`: `[..., hidden_size]`."""
        return F.embedding(index, self.weight)


class Reader(nn.Module):
    """Embeds rows: content, positions, and vectors in place of tokens that are not there."""

    def __init__(
        self,
        core: Core,
        asking: Asking,
        slots: Mapping[str, Slot],
        *,
        conditions: Sequence[Role] = (),
        extras: Sequence[str] = (),
    ) -> None:
        """Build the parts in their order.

        Args:
            core: sizes and groups.
            asking: how tokens ask.
            slots: the parts, by the names of their parameters.
            conditions: roles of the parts that take a condition, in the order of the inputs.
            extras: names of the floats, last among the inputs, that travel through to the head.
        """
        super().__init__()
        self.core, self.asking = core, asking
        self.conditions, self.extras = tuple(conditions), tuple(extras)
        self._names = {slot.role: name for name, slot in slots.items()}
        for name, slot in slots.items():
            setattr(self, name, slot.build())

    def part(self, role: Role) -> Any:
        """Return the part of a role; None where there is none."""
        name = self._names.get(role)
        return None if name is None else getattr(self, name)

    def embed_content(self, tokens: Tensor) -> Tensor:
        """Return `[b, m, h]` of tokens `[b, m, ...]`."""
        hidden: Tensor = self.part("content")(tokens)
        return hidden

    def add_positions(self, hidden: Tensor, places: Tensor, role: PositionRole) -> Tensor:
        """Add what absolute positions add to `hidden` `[b, m, h]` at cells `[b or 1, m]`."""
        placed: Tensor = self.part(role)(hidden, places)
        return placed

    def vector(self, role: Literal["query", "mask"], hidden: Tensor) -> Tensor:
        """Return the vector in place of a token, `[h]` like `hidden`: zeros without a part."""
        part: Tensor | None = self.part(role)
        return hidden.new_zeros(hidden.shape[-1]) if part is None else part.to(hidden.dtype)

    def after_start(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Put what precedes the first token in front of `hidden`: `[b, 1 + m, h]`."""
        part = self.part("start")
        start: Tensor = part(known["start"])[:, None] if "start" in known else part
        start = start.to(hidden.dtype).expand(len(hidden), 1, -1)
        return torch.cat([start, hidden], dim=1)

    def front_rows(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Return the rows in front, `[b, S, h]` like `hidden`; none where there is no part."""
        part = self.part("front")
        if part is None:
            return hidden[:, :0]
        if "front" in known:
            rows: Tensor = part(known["front"])[:, None]
            return rows.to(hidden.dtype)
        vectors: Tensor = part.to(hidden.dtype).view(-1, hidden.shape[-1])
        return vectors.expand(len(hidden), -1, -1)

    def carried(self, places: Tensor) -> Mapping[str, Tensor]:
        """Return what rotary and relative positions carry to the blocks, for `Embedded.places`."""
        carried: Mapping[str, Tensor] = self.part("positions").carried(places)
        return carried

    def transformed(self, tokens: Tensor) -> Tensor:
        """Return tokens `[b, n, d]` of those on their grid `[b, d, h, w]`, transformed."""
        return to_tokens(self.part("transform")(tokens)).contiguous()

    def untransformed(self, tokens: Tensor, num_rows: int) -> Tensor:
        """Undo `transformed`, for a grid of so many rows: tokens `[b, n, d]`."""
        return to_tokens(self.part("transform").inverse(to_grid(tokens, height=num_rows)))

    def forward(self, inputs: tuple[Tensor, ...]) -> PackedState:
        """Embed.

        Args:
            inputs: the rows, as the asking kind gives them, then conditions, then extras. For a
                memory: what its encoder reads, or `[b, c, h]`, what that has given.

        Returns:
            The `PackedState` of `[m, b, h]`, and the tensors of `core.carried_names`; in front of
            an encoder, that of its patches, which has these behind.
        """
        rows, inputs = inputs[: self.asking.num_inputs], inputs[self.asking.num_inputs :]
        known = dict(zip(self.conditions, inputs[: len(self.conditions)], strict=True))
        extras = map(as_bits, inputs[len(self.conditions) :])
        embedded = self.asking.embed(self, rows, known)
        carried = {
            **embedded.carried,
            **self.carried(embedded.places),
            **dict(zip(self.extras, extras, strict=True)),
        }
        memory = known.get("memory")
        if memory is not None and memory.ndim == 3:
            carried[MEMORY] = memory.transpose(0, 1).contiguous()
        ordered = {name: carried[name] for name in self.core.carried_names if name in carried}
        stream = LayerState(to_stream(embedded.hidden, self.core), ordered)
        if memory is None or memory.ndim == 3:
            return stream.pack()
        patches: LayerState = self.part("memory")(memory, stream)
        return patches.pack()
