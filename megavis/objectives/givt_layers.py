"""The layers of GIVT around the blocks: latents and labels in, parameters of a density out.

Legend: b images, n tokens, d numbers of a token, c channels and h, w the grid of latents.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.model.adapter import Adapter
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.init import filled, normal, truncated_normal
from megavis.model.patches import TokenHead, WholeLinear
from megavis.model.positions import cell_coordinates, grid_coordinates
from megavis.model.stream import State, Stream
from megavis.objectives.givt_config import LatentTokensConfig
from megavis.objectives.givt_maskgit_config import MaskGITConfig
from megavis.tokenizers.latents import stack, to_grid, to_tokens, unstack

TOKENS = "tokens"
"""Name under which the adapter's tokens travel to the head, which scores them."""

MASKED, VISIBLE, REPLACEMENT = range(3)
"""Rows after the classes in the masked model's table, as released."""


class Rows(nn.Module):
    """A table of learned vectors, whole on every process."""

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = filled(num_rows, hidden_size, fill=normal(1.0))

    def forward(self, index: Tensor) -> Tensor:
        """Look up int64 `[...]`: `[..., hidden_size]`."""
        return F.embedding(index, self.weight)


class LatentEmbedding(nn.Module):
    """Tokens, labels and positions; the adapter in front of them where there is one."""

    def __init__(
        self, core: Core, paper: LatentTokensConfig, positions: PositionKind, *, num_rows: int
    ) -> None:
        super().__init__()
        width = core.megatron.hidden_size
        self.core, self.paper = core, paper
        self.height, self.width = paper.grid(core.config)
        self.adapter: Adapter | None = None
        if paper.adapter_blocks:
            self.adapter = Adapter(
                paper.token_size,
                num_blocks=paper.adapter_blocks,
                bottleneck=paper.adapter_bottleneck or 4 * paper.token_size,
            )
        self.labels = Rows(num_rows, width)
        # Flax's default for a dense layer.
        self.linear = WholeLinear(paper.token_size, width, truncated_normal(paper.token_size**-0.5))
        self.positions = grid_positions(
            core, positions, (self.height, self.width), fill=normal(width**-0.5)
        )

    def tokens(self, content: Tensor) -> Tensor:
        """Return tokens `[b, n, d]`: of latents `[b, c, h, w]`, adapted, or as they are."""
        if content.ndim == 3:
            return content
        grid = stack(content, self.paper.stacked_latents)
        return to_tokens(grid if self.adapter is None else self.adapter(grid)).contiguous()

    def latents(self, tokens: Tensor) -> Tensor:
        """Undo `tokens`: `[b, n, d]` to latents `[b, c, h, w]`."""
        grid = to_grid(tokens, height=self.height)
        grid = grid if self.adapter is None else self.adapter.inverse(grid)
        return unstack(grid, self.paper.stacked_latents)

    def pack(self, hidden: Tensor, coordinates: Tensor, tokens: Tensor) -> State:
        """Return what goes to the first block."""
        carried = {} if self.adapter is None else {TOKENS: tokens}
        carried |= self.positions.carried(coordinates)
        return Stream(to_stream(hidden, self.core), carried).pack()

    @abstractmethod
    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed."""


class CausalEmbedding(LatentEmbedding):
    """Each place sees the token before its own; the first sees the label."""

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed.

        Args:
            inputs: latents `[b, c, h, w]` and rows of the labels int64 `[b]`. Or, to go on from
                what a cache holds: the tokens before some places `[b, m, d]`, the labels, and
                the places int64 `[1, m]`.

        Returns:
            `[m, b, h]`, and with an adapter the tokens.
        """
        content, labels, *places = inputs
        tokens = before = self.tokens(content)
        if places:
            place = places[0]
        else:
            before = F.pad(tokens, (0, 0, 1, 0))[:, :-1]
            place = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.linear(before)
        label = self.labels(labels)[:, None]
        hidden = torch.where((place == 0)[..., None], label, hidden)
        coordinates = cell_coordinates(place, self.width)
        return self.pack(self.positions(hidden, coordinates), coordinates, tokens)


class MaskedEmbedding(LatentEmbedding):
    """All tokens after the label, some of them hidden; half of the width says which."""

    paper: MaskGITConfig

    def __init__(
        self, core: Core, paper: MaskGITConfig, positions: PositionKind, *, num_rows: int
    ) -> None:
        super().__init__(core, paper, positions, num_rows=num_rows)
        self.first_special = paper.num_classes or 1
        self.label_position: nn.Parameter | None = None
        if positions == "learned":
            width = core.megatron.hidden_size
            self.label_position = filled(width, fill=normal(width**-0.5))

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed.

        Args:
            inputs: latents `[b, c, h, w]` or tokens `[b, n, d]`, rows of the labels int64 `[b]`,
                and the mask, bool `[b, n]`, true where a token is hidden.

        Returns:
            `[1 + n, b, h]`, the label first, and with an adapter the tokens.
        """
        content, labels, mask = inputs
        tokens, hidden_tokens = self.tokens(content), mask[..., None]
        marks = torch.where(hidden_tokens, self._special(MASKED), self._special(VISIBLE))
        if self.paper.masked_input == "zeros":
            embedded = self.linear(tokens.masked_fill(hidden_tokens, 0.0))
        else:
            embedded = torch.where(hidden_tokens, self._special(REPLACEMENT), self.linear(tokens))
        # As released, every second number of each.
        both = torch.cat([marks[..., ::2], embedded[..., ::2]], dim=-1)
        coordinates = grid_coordinates(self.height, self.width, tokens.device)
        label = self.labels(labels)[:, None]
        if self.label_position is not None:
            label = label + self.label_position
        hidden = torch.cat([label, self.positions(both, coordinates)], dim=1)
        # For rotary positions the label stands in the corner.
        return self.pack(hidden, F.pad(coordinates, (0, 0, 1, 0)), tokens)

    def _special(self, row: int) -> Tensor:
        return self.labels.weight[self.first_special + row]


class DensityHead(TokenHead):
    """The last norm and a matrix to the parameters of a density."""

    def __init__(self, core: Core, paper: LatentTokensConfig, *, num_skipped: int = 0) -> None:
        super().__init__(core, paper.num_outputs, normal(paper.head_std))
        self.num_skipped = num_skipped

    # With an adapter there is more to hand on than another head has.
    def forward(self, state: State) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map `[s, b, h]` to parameters `[b, n, num_outputs]`; then what the adapter gave."""
        stream = Stream.unpack(state, self.core.carries)
        parameters = self.linear(self.norm.whole(stream.hidden))[:, self.num_skipped :]
        if TOKENS not in stream.carried:
            return parameters
        return parameters, stream.carried[TOKENS]
