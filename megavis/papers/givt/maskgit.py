"""GIVT-MaskGIT: masked latents are predicted from the others.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.2, after "MaskGIT" (Chang et al.,
2022): the mask ratio cos(π/2 · u) is drawn for each image.

Legend: b images, n tokens, d channels of a token, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.asking import TRANSFORMED, Mask
from megavis.composition.reader import Reader, Role
from megavis.model.embeddings import to_stream
from megavis.model.layer_state import LayerState, PackedState
from megavis.papers.givt.config import MaskGITConfig
from megavis.papers.givt.paper import GIVT
from megavis.schedules.masked import Rounds

MASKED, VISIBLE, REPLACEMENT = range(3)
"""Special rows after the classes in the table of labels, as in the released models."""


class MaskedReader(Reader):
    """Embeds the label and all tokens; half of the width marks which tokens are masked."""

    def __init__(self, paper: MaskGITConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.paper, self.first_special = paper, paper.num_classes or 1

    def forward(self, inputs: tuple[Tensor, ...]) -> PackedState:
        """Embed.

        Args:
            inputs: tokens `[b, n, d]`, or on their grid if the adapter has yet to transform them;
                their places; the mask bool `[b, n]`, true where a token is masked; and label rows
                int64 `[b]`.

        Returns:
            `[1 + n, b, h]`, the label first, which carries the tokens if there is an adapter.
        """
        tokens, places, mask, labels = inputs
        tokens = self.transformed(tokens) if tokens.ndim == 4 else tokens
        is_hidden = mask[..., None]
        marks = torch.where(is_hidden, self._special(MASKED), self._special(VISIBLE))
        if self.paper.masked_input == "zeros":
            embedded = self.embed_content(tokens.masked_fill(is_hidden, 0.0))
        else:
            embedded = torch.where(
                is_hidden, self._special(REPLACEMENT), self.embed_content(tokens)
            )
        # As in the released code, every second channel of each.
        both = torch.cat([marks[..., ::2], embedded[..., ::2]], dim=-1)
        label = self.part("start")(labels)[:, None]
        label = label + self.front_rows(label, {}).sum(1, keepdim=True)
        hidden = torch.cat([label, self.add_positions(both, places, "positions")], dim=1)
        carried = {} if self.part("transform") is None else {TRANSFORMED: tokens}
        # For rotary positions the label is at the first cell.
        carried |= self.carried(F.pad(places, (1, 0)))
        return LayerState(to_stream(hidden, self.core), carried).pack()

    def _special(self, row: int) -> Tensor:
        table: Tensor = self.part("start").weight
        return table[self.first_special + row]


class GIVTMaskGIT(GIVT):
    """Predict masked latents."""

    config_type = MaskGITConfig
    paper: MaskGITConfig
    num_special_rows = 3

    @cached_property
    def schedule(self) -> Rounds:
        """Mask a drawn share of the tokens; generate in rounds."""
        return Rounds(self.orders, least_masking=self.paper.least_masking, seed=self.config.seed)

    @cached_property
    def asks(self) -> Mask:
        """One row per token, masked or not, after the label."""
        return Mask(num_front=1)

    @property
    def likelihood(self) -> None:
        """None: masked tokens are predicted independently."""
        return None

    @property
    def part_names(self) -> Mapping[Role, str]:
        """Names of the causal model's parts, and of the label's position."""
        names = super().part_names
        is_learned = self.position_kind == "learned"
        return {**names, "front": "label_position"} if is_learned else names

    def build_embedding(self) -> MaskedReader:
        """Build the first layer."""
        return MaskedReader(self.paper, self.core, self.asks, self.slots())
