"""The linear layers and norms of a block, by library: `training.kernels` selects one.

Their parameters have the same names, shapes and initial values in every library, so a checkpoint
does not depend on it. The setting is process-wide (`choose_kernels`) and made only by training: a
run that is opened for sampling or evaluation has plain layers on any device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from megavis.config.schema import ModelConfig
from megavis.model.kernels import chosen_kernels
from megavis.model.norms import GainNorm, Norm
from megavis.model.tensor_parallel import (
    ColumnParallelLinear,
    Precision,
    QueryKeyValue,
    RowParallelLinear,
)


@dataclass(frozen=True)
class BlockLayers:
    """The layers of one library.

    Attributes:
        column_parallel: a linear layer split by output features.
        query_key_value: the same for queries, keys and values; see `QueryKeyValue`.
        row_parallel: a linear layer split by input features, whose bias the caller adds.
        norm: RMS or layer norm with the interface of `Norm`.
        gain_norm: the same without bias.
        fp8: returns the context of FP8 for a stack and the size of its tensor group.
        multiplies_parts: whether self-attention multiplies parts of its projection where that saves
            products; FP8 needs whole weights.
    """

    column_parallel: type
    query_key_value: type
    row_parallel: type
    norm: type
    gain_norm: type
    fp8: Callable[[ModelConfig, int], Precision]
    multiplies_parts: bool = True


_PLAIN = BlockLayers(
    ColumnParallelLinear,
    QueryKeyValue,
    RowParallelLinear,
    Norm,
    GainNorm,
    fp8=lambda model, tensor_size: contextlib.nullcontext,
)


def block_layers() -> BlockLayers:
    """Return the layers of the library that `choose_kernels` has set."""
    if chosen_kernels() != "transformer_engine":
        return _PLAIN
    # Imports Transformer Engine, which need not be installed otherwise.
    from megavis.model import transformer_engine

    return BlockLayers(
        transformer_engine.ColumnParallelLinear,
        transformer_engine.QueryKeyValue,
        transformer_engine.RowParallelLinear,
        transformer_engine.BlockNorm,
        transformer_engine.BlockGainNorm,
        transformer_engine.fp8,
        multiplies_parts=False,
    )
