"""Maps of ids, positions and patches to the residual stream, and from there to outputs per token.

Embeddings of ids are split over the tensor group by vocabulary. Linear maps of patches and outputs
are replicated on every process, since they are small compared with a block.

Legend: b images, s tokens, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megavis.config.section import PositionKind
from megavis.model.context_parallel import all_tokens, gather_context, own_tokens
from megavis.model.core import Core
from megavis.model.heads import Head, predicting
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import Norm
from megavis.model.parameters import Fill, set_decay, xavier_uniform
from megavis.model.positions import Positions
from megavis.model.tensor_parallel import gather_tokens


def token_embedding(core: Core, vocabulary_size: int, fill: Fill) -> VocabParallelEmbedding:
    """Return an embedding split over the tensor group by vocabulary, without weight decay."""
    embedding = VocabParallelEmbedding(
        vocabulary_size,
        core.megatron.hidden_size,
        init_method=fill,
        config=core.megatron,
        tp_group=core.groups.tp,
    )
    set_decay(embedding.weight, "as embedding")
    return embedding


def grid_positions(
    core: Core,
    kind: PositionKind,
    grid: tuple[int, int],
    *,
    fill: Fill,
    zeroes_start: bool = False,
) -> Positions:
    """Return positions on a grid of rows and columns, scaled by `model.position_scale`."""
    height, width = grid
    return Positions(
        kind,
        height=height,
        width=width,
        hidden_size=core.megatron.hidden_size,
        fill=fill,
        scale=core.model.position_scale,
        head_size=core.model.head_size,
        zeroes_start=zeroes_start,
    )


def to_stream(hidden: Tensor, core: Core) -> Tensor:
    """Convert `[b, s, h]` to this process's tokens of Megatron's `[s, b, h]`."""
    return own_tokens(hidden.transpose(0, 1).contiguous(), core.megatron, core.groups)


class ReplicatedLinear(nn.Linear):
    """A replicated linear layer, with zero initial bias, computed in the precision of its weights.

    It initialises its own weight, since ZeRO-3 partitions weights as soon as their module is built.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        fill: Fill = xavier_uniform,
        *,
        has_bias: bool = True,
    ) -> None:
        super().__init__(num_inputs, num_outputs, bias=has_bias)
        # Keep torch's own initialization, which advances the generator: without it, every initial
        # weight would change.
        fill(self.weight)
        if has_bias:
            nn.init.zeros_(self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[..., num_inputs]` to `[..., num_outputs]`."""
        return F.linear(inputs.to(self.weight.dtype), self.weight, self.bias)


class LastNorm(Norm):
    """The final norm before a head or a bridge."""

    def __init__(self, core: Core) -> None:
        config: TransformerConfig = core.megatron
        super().__init__(config, config.hidden_size, config.layernorm_epsilon)
        self.config, self.groups = config, core.groups

    def whole(self, hidden: Tensor) -> Tensor:
        """Normalise `[s, b, h]` and return it gathered and batch first: `[b, s, h]`."""
        normalised = self(hidden)
        return all_tokens(normalised, self.config, self.groups).transpose(0, 1)

    def own(self, normed: Tensor) -> Tensor:
        """Return this context-parallel process's part `[b, s / p, h]` of normalised tokens."""
        return gather_tokens(normed, self.config, self.groups.tp).transpose(0, 1)

    def gather(self, predictions: Tensor) -> Tensor:
        """Gather predictions for the tokens of `own`: `[b, s / p, d]` to `[b, s, d]`."""
        stream = predictions.transpose(0, 1)
        return gather_context(stream, self.config, self.groups).transpose(0, 1)


class WholeNorm(Norm):
    """A norm where every process has all tokens, as in a first layer or inside a head.

    Its gradients are then complete on every process. `Norm` is for tokens that sequence parallelism
    splits: it would sum the gradients over the tensor group, making them too large.
    """

    def __init__(self, core: Core) -> None:
        config: TransformerConfig = core.megatron
        super().__init__(config, config.hidden_size, config.layernorm_epsilon)

    @staticmethod
    def is_split(config: TransformerConfig) -> bool:
        """Return False."""
        return False


class NormedLinear(ReplicatedLinear):
    """A linear map and a norm of its output, where every process has all tokens."""

    def __init__(self, core: Core, num_inputs: int, fill: Fill = xavier_uniform) -> None:
        super().__init__(num_inputs, core.megatron.hidden_size, fill)
        self.norm = WholeNorm(core)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[..., num_inputs]` to `[..., h]`."""
        return self.norm(super().forward(inputs))


class TokenHead(Head):
    """The final norm and a linear map of each token, for example to pixels or positions.

    Args:
        num_skipped: leading tokens that predict nothing.
        also_return: name of a carried tensor to return after the predictions.
    """

    norm: LastNorm

    def __init__(
        self,
        core: Core,
        num_outputs: int,
        fill: Fill = xavier_uniform,
        *,
        num_skipped: int = 0,
        also_return: str | None = None,
    ) -> None:
        super().__init__(core, LastNorm(core))
        self.num_skipped, self.also_return = num_skipped, also_return
        self.linear = ReplicatedLinear(core.megatron.hidden_size, num_outputs, fill)

    def forward(self, state: PackedState) -> Any:
        """Map `[s, b, h]` to `[b, s - num_skipped, num_outputs]`, complete on every process.

        With `also_return`, return a pair of this and the carried tensor.
        """
        # Map before gathering, so that each process of a context group maps only its own tokens.
        predictions = self.norm.gather(self.linear(self.norm.own(self.normed(state))))
        predictions = predicting(predictions, self.num_skipped)
        if self.also_return is None:
            return predictions
        carried = LayerState.unpack(state, self.core.carried_names).carried
        return predictions, carried[self.also_return]
