"""The first layer of every paper, and the bridge to the second stack of some.

`SecondStack` is a decoder such as MAE's; the bridge to it adds mask tokens for the positions that
the encoder did not see.

Legend: b images, m rows, n positions, h hidden size, w width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.asking import ORDER, Asking
from megavis.composition.parts import Part, Parts, Role
from megavis.config.section import PositionKind
from megavis.model.core import MEMORY, Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.flops import Workload
from megavis.model.layer_state import LayerState, PackedState, as_bits
from megavis.model.modulation import MODULATION
from megavis.model.parameters import filled, normal, set_decay
from megavis.model.positions import PLACES
from megavis.model.stack import Bridge, LayerPlan, block_plans


class Reader(Parts):
    """Embeds rows: content, positions, and vectors that stand for absent tokens.

    Args:
        parts: how to build each part.
        seed: the run's seed.
        conditions: roles of the parts that embed a condition, in the order of the inputs.
        extras: names of float tensors, the last inputs, that are carried to the head.

    Rows with vectors that modulate them are numbered: int64 `[b, m]`, the input after the rows.
    """

    def __init__(
        self,
        core: Core,
        asking: Asking,
        parts: Mapping[Role, Part],
        *,
        seed: int,
        conditions: Sequence[Role] = (),
        extras: Sequence[str] = (),
    ) -> None:
        super().__init__(parts, seed=seed, dropout=core.model.embedding_dropout)
        self.core, self.asking = core, asking
        self.conditions, self.extras = tuple(conditions), tuple(extras)

    def forward(self, inputs: tuple[Tensor, ...]) -> PackedState:
        """Embed.

        Args:
            inputs: the rows from the asking kind, then conditions, then extras. The condition for
                `encoder` is the encoder's input, or its output `[b, c, h]`.

        Returns:
            The `PackedState` of `[m, b, h]` with the tensors of `core.carried_names`; before an
            encoder, the state of the encoder's patches, which carries all of these.
        """
        rows, inputs = inputs[: self.asking.num_inputs], inputs[self.asking.num_inputs :]
        numbers = None
        if "row_vectors" in self.roles:
            numbers, inputs = inputs[0], inputs[1:]
        known = dict(zip(self.conditions, inputs[: len(self.conditions)], strict=True))
        # DeepSpeed's pipeline expects a gradient for every float tensor; data, such as noise, have
        # none.
        extras = map(as_bits, inputs[len(self.conditions) :])
        embedded = self.asking.embed(self, rows, known)
        carried = {
            **embedded.carried,
            **self.carried(embedded.places),
            **dict(zip(self.extras, extras, strict=True)),
        }
        if PLACES in self.core.carried_names:
            read = embedded.read_places
            carried[PLACES] = (embedded.places if read is None else read).contiguous()
        if self.core.is_modulated:
            vectors = self.modulation(embedded.hidden, known, numbers)
            carried[MODULATION] = to_stream(vectors, self.core)
        memory = known.get("encoder")
        if memory is not None and memory.ndim == 3:
            carried[MEMORY] = memory.transpose(0, 1).contiguous()
        # Not all are here yet: `carries_samples` appends the sample indices, an encoder the memory.
        ordered = {name: carried[name] for name in self.core.carried_names if name in carried}
        norm, hidden = self.part("row_norm"), embedded.hidden
        hidden = hidden if norm is None else norm(hidden)
        stream = LayerState(to_stream(hidden, self.core), ordered)
        if memory is None or memory.ndim == 3:
            return stream.pack()
        patches: LayerState = self.part("encoder")(memory, stream)
        return patches.pack()


class SecondStack:
    """A decoder with full attention and without stochastic depth.

    Args:
        sizes: values of `model` keys that differ from the encoder's.
        tokens_decay: apply weight decay to the mask token.
        places_front: add learned positions to the rows in front.
        extras: names of the head's inputs besides hidden states, of which the bridge makes places.
    """

    def __init__(
        self,
        below: Core,
        sizes: Mapping[str, int],
        *,
        num_front: int,
        grid: tuple[int, int],
        positions: PositionKind,
        tokens_decay: bool = False,
        places_front: bool = False,
        extras: tuple[str, ...] = (),
    ) -> None:
        # None: the MLP's size follows from the decoder's width, not from the encoder's.
        model = below.model.model_copy(update={**sizes, "ffn_hidden_size": None})
        self.core = below.with_stack(
            name="decoder",
            model=model,
            visibility_kind="full",
            carried_names=extras,
            drop_path=0.0,
        )
        self.below, self.num_front, self.grid = below, num_front, grid
        self.positions, self.tokens_decay = positions, tokens_decay
        self.places_front = places_front

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
            places_front=self.places_front,
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
        places_front: bool = False,
    ) -> None:
        super().__init__(below, above)
        fill, self.num_front = normal(0.02), num_front
        self.mask = filled(above.model.hidden_size, fill=fill)
        if tokens_decay:
            set_decay(self.mask, "always")
        self.positions = grid_positions(above, positions, grid, fill=fill)
        self.front_position: nn.Parameter | None = None
        if places_front:
            self.front_position = filled(num_front, above.model.hidden_size, fill=fill)

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return front rows, visible tokens and mask tokens, `[b, num_front + n, w]`."""
        order, front = carried[ORDER], hidden[:, : self.num_front]
        visible, mask = hidden[:, self.num_front :], self.mask.to(hidden.dtype)
        if "content_groups" in carried:  # Some rows hold tokens that are hidden in their image.
            is_hidden = carried["content_groups"][:, self.num_front :, None] > 0
            visible = torch.where(is_hidden, mask, visible)
        masks = mask.expand(len(hidden), order.shape[1] - visible.shape[1], -1)
        if self.front_position is not None:
            front = front + self.front_position.to(front.dtype)
        patches = self.positions(torch.cat([visible, masks], dim=1), order)
        places = F.pad(order, (self.num_front, 0))
        return torch.cat([front, patches], dim=1), {**carried, PLACES: places}
