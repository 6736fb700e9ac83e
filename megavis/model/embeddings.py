"""From ids and coordinates to the residual stream."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megavis.model.core import Core
from megavis.model.init import Fill


def token_embedding(core: Core, vocabulary_size: int, fill: Fill) -> VocabParallelEmbedding:
    """Return an embedding split over the tensor group by vocabulary rows."""
    return VocabParallelEmbedding(
        vocabulary_size,
        core.megatron.hidden_size,
        init_method=fill,
        config=core.megatron,
        tp_group=core.groups.tp,
    )


class LearnedPositions(nn.Module):
    """One learned vector for each coordinate."""

    def __init__(self, num_positions: int, hidden_size: int, fill: Fill) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        fill(self.weight)

    def forward(self, coordinates: Tensor) -> Tensor:
        """Look up int64 coordinates `[...]`; returns `[..., hidden_size]`."""
        return nn.functional.embedding(coordinates, self.weight)


def to_stream(hidden: Tensor, core: Core) -> Tensor:
    """Turn `[b, s, h]` into Megatron's `[s, b, h]`, split by tokens under sequence parallelism."""
    hidden = hidden.transpose(0, 1).contiguous()
    if core.megatron.sequence_parallel:
        return scatter_to_sequence_parallel_region(hidden, core.groups.tp)
    return hidden
