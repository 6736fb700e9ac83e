"""The first layer of every paper, and the bridge to the second stack of some.

The first layer has named parts that embed tokens, positions and conditions.

A paper chooses the names of the parts, which begin their parameters', and the order in which they
are built, which determines their initial weights. `SecondStack` is a decoder such as MAE's; the
bridge to it adds mask tokens for the positions that the encoder did not see.

Legend: b images, m rows, n positions, h hidden size, w width of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.asking import ORDER, Asking, Visible
from megavis.config.section import PositionKind
from megavis.model.core import MEMORY, Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.flops import Workload
from megavis.model.layer_state import LayerState, PackedState, as_bits
from megavis.model.norms import Norm
from megavis.model.parameters import Fill, filled, has_partial_gradient, normal, with_decay
from megavis.model.stack import Bridge, LayerPlan, block_plans
from megavis.tokenizers.patches import to_grid, to_tokens

Role = Literal[
    "content", "positions", "asked_positions", "start", "query", "mask", "front", "transform",
    "memory",
]  # fmt: skip
"""What a part is for:

- `content`: embeds tokens `[b, m, ...]` to `[b, m, h]`.
- `positions`, `asked_positions`: `Positions` of content and of predicted tokens.
- `start`: a start token before the first token: a vector, or a table by class.
- `query`, `mask`: a vector that stands for a token to predict, or a hidden one.
- `front`: vectors in front of all rows, or a map of a condition to one.
- `transform`: a learned, invertible map of tokens on their grid (`forward`, `inverse`).
- `memory`: embeds the input of an encoder, to whose output blocks attend (`EncoderInput`).
"""

PositionRole = Literal["positions", "asked_positions"]


class Reader(nn.Module):
    """Embeds rows: content, positions, and vectors that stand for absent tokens.

    Args:
        conditions: roles of the parts that embed a condition, in the order of the inputs.
        extras: names of float tensors, the last inputs, that are carried to the head.
    """

    def __init__(
        self,
        core: Core,
        asking: Asking,
        slots: Mapping[str, Slot],
        *,
        conditions: Sequence[Role] = (),
        extras: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.core, self.asking = core, asking
        self.conditions, self.extras = tuple(conditions), tuple(extras)
        self._names = {slot.role: name for name, slot in slots.items()}
        for name, slot in slots.items():
            setattr(self, name, slot.build())

    def part(self, role: Role) -> Any:
        """Return the part with this role, or None."""
        name = self._names.get(role)
        return None if name is None else getattr(self, name)

    def embed_content(self, tokens: Tensor) -> Tensor:
        """Embed tokens `[b, m, ...]` as `[b, m, h]`."""
        return self.part("content")(tokens)

    def add_positions(self, hidden: Tensor, places: Tensor, role: PositionRole) -> Tensor:
        """Add absolute positions of the cells `[b or 1, m]` to `hidden` `[b, m, h]`."""
        return self.part(role)(hidden, places)

    def vector(self, role: Literal["query", "mask"], hidden: Tensor) -> Tensor:
        """Return a query or mask vector `[h]` in the dtype of `hidden`; zeros without a part."""
        part: Tensor | None = self.part(role)
        return hidden.new_zeros(hidden.shape[-1]) if part is None else part.to(hidden.dtype)

    def prepend_start(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Prepend the start token to `hidden`: `[b, 1 + m, h]`."""
        part = self.part("start")
        start: Tensor = part(known["start"])[:, None] if "start" in known else part
        start = start.to(hidden.dtype).expand(len(hidden), 1, -1)
        return torch.cat([start, hidden], dim=1)

    def front_rows(self, hidden: Tensor, known: Mapping[Role, Tensor]) -> Tensor:
        """Return the front rows `[b, num_front, h]` in the dtype of `hidden`; 0 without a part."""
        part = self.part("front")
        if part is None:
            return hidden[:, :0]
        if "front" in known:
            rows: Tensor = part(known["front"])[:, None]
            return rows.to(hidden.dtype)
        vectors: Tensor = part.to(hidden.dtype).view(-1, hidden.shape[-1])
        return vectors.expand(len(hidden), -1, -1)

    def carried(self, places: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that rotary and relative positions carry, for `Embedded.places`."""
        return self.part("positions").carried(places)

    def transformed(self, tokens: Tensor) -> Tensor:
        """Transform tokens on their grid `[b, d, h, w]`; return them as `[b, n, d]`."""
        return to_tokens(self.part("transform")(tokens)).contiguous()

    def untransformed(self, tokens: Tensor, num_rows: int) -> Tensor:
        """Apply the inverse transform to tokens `[b, n, d]` on a grid of `num_rows` rows."""
        return to_tokens(self.part("transform").inverse(to_grid(tokens, height=num_rows)))

    def forward(self, inputs: tuple[Tensor, ...]) -> PackedState:
        """Embed.

        Args:
            inputs: the rows from the asking kind, then conditions, then extras. The condition for
                `memory` is the encoder's input, or its output `[b, c, h]`.

        Returns:
            The `PackedState` of `[m, b, h]` with the tensors of `core.carried_names`; before an
            encoder, the state of the encoder's patches, which carries all of these.
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


@dataclass(frozen=True)
class Slot:
    """The role and the constructor of a part."""

    role: Role
    build: Callable[[], nn.Module | nn.Parameter]


def with_whole_norms(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a first layer, in which every process has all tokens.

    Raises:
        TypeError: a norm in it is one of split tokens, whose gradients would be wrong under
            sequence parallelism, by a factor of the tensor-parallel size.
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


class SecondStack:
    """A decoder with full attention and without stochastic depth.

    Args:
        sizes: values of `model` keys that differ from the encoder's.
        tokens_decay: apply weight decay to the mask token.
    """

    def __init__(
        self,
        below: Core,
        asks: Visible,
        sizes: Mapping[str, int],
        *,
        grid: tuple[int, int],
        positions: PositionKind,
        tokens_decay: bool = False,
    ) -> None:
        model = below.model.model_copy(update={**sizes, "ffn_hidden_size": None})
        self.core = below.with_stack(name="decoder", model=model, carried_names=(), drop_path=0.0)
        self.below, self.num_front, self.grid = below, asks.num_front, grid
        self.positions, self.tokens_decay = positions, tokens_decay

    def layers(self, num_outputs: int, *, seed: int) -> list[LayerPlan]:
        """Return bridge and blocks, below a head with `num_outputs` outputs per token."""
        rows, depth = self.num_front + self.grid[0] * self.grid[1], self.below.model.num_layers + 1
        work = Workload.of_one_stream(rows, num_outputs, causal=False)
        build = partial(
            MaskTokens,
            self.below,
            self.core,
            num_front=self.num_front,
            grid=self.grid,
            positions=self.positions,
            tokens_decay=self.tokens_decay,
        )
        bridge = LayerPlan("bridge", build, seed, depth, gives_features=True)
        return [bridge, *block_plans(self.core, work, seed=seed, depth=depth + 1)]


class MaskTokens(Bridge):
    """Bridge from encoder to decoder: append mask tokens, and add positions to all tokens."""

    def __init__(
        self,
        below: Core,
        above: Core,
        *,
        num_front: int,
        grid: tuple[int, int],
        positions: PositionKind,
        tokens_decay: bool,
    ) -> None:
        super().__init__(below, above)
        fill, self.num_front = normal(0.02), num_front
        self.mask = filled(above.model.hidden_size, fill=fill)
        if tokens_decay:
            with_decay(self.mask)
        self.positions = grid_positions(above, positions, grid, fill=fill)

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return front rows, visible tokens and mask tokens, `[b, num_front + n, w]`."""
        order, front = carried[ORDER], hidden[:, : self.num_front]
        visible = hidden[:, self.num_front :]
        num_hidden = order.shape[1] - visible.shape[1]
        masks = self.mask.to(hidden.dtype).expand(len(hidden), num_hidden, -1)
        patches = self.positions(torch.cat([visible, masks], dim=1), order)
        return torch.cat([front, patches], dim=1), {}
