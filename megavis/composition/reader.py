"""The first layer of every paper, and the bridge to the second stack of some.

`SecondStack` is a decoder such as MAE's; the bridge to it adds mask tokens for the positions that
the encoder did not see.

Legend: b images, m rows, n positions, h hidden size, w width of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.asking import ORDER, Asking
from megavis.composition.parts import Part, Parts, Role
from megavis.grammar.grammar import Grammar
from megavis.grammar.words import Visible
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
    """A decoder with full attention and without stochastic depth, above an encoder.

    Args:
        below: core of the encoder.
        grammar: a paper whose rows hold known tokens alone.
        grid: rows and columns of the tokens.
        extras: names of the head's inputs besides hidden states, of which the bridge makes places.
    """

    def __init__(
        self, below: Core, grammar: Grammar, grid: tuple[int, int], extras: tuple[str, ...] = ()
    ) -> None:
        assert isinstance(grammar.asks, Visible)
        # None: the MLP's size follows from the decoder's width, not from the encoder's.
        sizes = {**grammar.asks.decoder.model_dump(), "ffn_hidden_size": None}
        self.core = below.with_stack(
            name="decoder",
            model=below.model.model_copy(update=sizes),
            visibility_kind="full",
            carried_names=extras,
            drop_path=0.0,
        )
        self.below, self.grammar, self.grid = below, grammar, grid
        self.tokens_decay = grammar.asks.tokens_decay

    def layers(self, num_outputs: int, *, seed: int) -> list[LayerPlan]:
        """Return bridge and blocks, below a head with `num_outputs` outputs per token."""
        rows, depth = self.grammar.rows(math.prod(self.grid)), self.below.model.num_layers + 1
        work = Workload.of_one_stream(rows.decoder, num_outputs, causal=False)
        bridge = LayerPlan("bridge", partial(MaskTokens, self), seed, depth, gives_features=True)
        return [bridge, *block_plans(self.core, work, seed=seed, depth=depth + 1)]


class MaskTokens(Bridge):
    """Bridge from encoder to decoder: append mask tokens, and add positions to all tokens."""

    def __init__(self, stack: SecondStack) -> None:
        super().__init__(stack.below, stack.core)
        grammar, width, fill = stack.grammar, stack.core.model.hidden_size, normal(0.02)
        self.num_front = grammar.num_front
        self.mask = filled(width, fill=fill)
        if stack.tokens_decay:
            set_decay(self.mask, "always")
        self.positions = grid_positions(stack.core, grammar.positions, stack.grid, fill=fill)
        self.front_position: nn.Parameter | None = None
        if grammar.places_front:
            self.front_position = filled(self.num_front, width, fill=fill)

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
