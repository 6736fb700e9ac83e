"""Embeddings of ids and positions into the residual stream."""

from __future__ import annotations

from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor

from megavis.config.choices import PositionKind
from megavis.model.core import Core
from megavis.model.declarations import without_decay
from megavis.model.init import Fill
from megavis.model.positions import Positions
from megavis.model.sequence_parallel import own_tokens


def token_embedding(core: Core, vocabulary_size: int, fill: Fill) -> VocabParallelEmbedding:
    """Return an embedding split over the tensor group by vocabulary rows. It does not decay."""
    embedding = VocabParallelEmbedding(
        vocabulary_size,
        core.megatron.hidden_size,
        init_method=fill,
        config=core.megatron,
        tp_group=core.groups.tp,
    )
    without_decay(embedding.weight)
    return embedding


def grid_positions(
    core: Core, kind: PositionKind, grid: tuple[int, int], *, fill: Fill
) -> Positions:
    """Return positions on a grid of rows and columns, scaled as the config says.

    Args:
        core: its hidden size is that of the positions.
        kind: see `Positions`.
        grid: rows and columns.
        fill: of learned positions.
    """
    height, width = grid
    return Positions(
        kind,
        height=height,
        width=width,
        hidden_size=core.megatron.hidden_size,
        fill=fill,
        scale=core.model.position_scale,
    )


def to_stream(hidden: Tensor, core: Core) -> Tensor:
    """Turn `[b, s, h]` into Megatron's `[s, b, h]`, split by tokens under sequence parallelism."""
    return own_tokens(hidden.transpose(0, 1).contiguous(), core.megatron, core.groups.tp)
