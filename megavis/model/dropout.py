"""Drop path, and dropout of tensor-parallel features and of residual branches.

Drop path is "Deep Networks with Stochastic Depth" (Huang et al., 2016), drawn for each image and
branch as a function of seed, sample and block, so that all layouts drop the same. The sample
indices are carried with the hidden states; in training they are the last input of the first layer.

Legend: b images, p branches of a block (attention, MLP, cross-attention), s tokens, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor, nn

from megavis.model.kernels import is_fused
from megavis.model.layer_state import PackedState
from megavis.model.tensor_parallel import SequenceParallelConfig, splits_tokens
from megavis.parallel.random import rank_local_rng, uniform

SAMPLES = "samples"
"""Name under which the sample indices, int64 `[b]`, are carried; zeros outside training."""


def drop_path_of(number: int, num_layers: int, rate: float) -> float:
    """Return the drop path rate of block `number`, counted from 1.

    It increases linearly from 0 in the first block to `rate` in the last, as in DeiT and MAE.
    """
    return rate * (number - 1) / max(1, num_layers - 1)


def draw_kept(
    samples: Tensor, *, num_parts: int, rate: float, seed: int, block: int | str
) -> Tensor:
    """Draw the factor of each branch of a block: float32 `[p, b, 1]`, 0 or 1 / (1 - rate).

    Args:
        samples: int64 `[b]`.
        rate: probability of 0.
        block: number of the block, prefixed by the name of its stack unless it is the first stack.
    """
    draws = uniform(samples, num_parts, seed=seed, purpose=f"drop-path-{block}")
    return ((draws >= rate).float() / (1.0 - rate)).t()[:, :, None]


def carries_samples(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory of the same first layer that also carries the sample indices.

    Uses hooks rather than a wrapper module, so that parameters keep their names.
    """
    samples: list[Tensor] = []

    def take(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not layer.training:
            return None
        *inputs, numbers = arguments[0]
        samples.append(numbers)
        return (tuple(inputs),)

    def add(layer: nn.Module, _: Any, state: PackedState) -> PackedState:
        own = (state,) if isinstance(state, Tensor) else state
        if layer.training:
            return (*own, samples.pop())
        none = torch.zeros(own[0].shape[1], dtype=torch.int64, device=own[0].device)
        return (*own, none)

    def built() -> nn.Module:
        layer = build()
        layer.register_forward_pre_hook(take)
        layer.register_forward_hook(add)
        return layer

    return built


class SplitDropout(nn.Module):
    """Dropout on features that are split over the tensor group."""

    def __init__(self, probability: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.probability, self.group = probability, group

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of this process's features in training."""
        if not self.training:
            return x
        with rank_local_rng(self.group.rank(), self.group.size()):
            return F.dropout(x, self.probability)


def add_to_residual(
    dropout: float, config: SequenceParallelConfig, group: dist.ProcessGroup
) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return Megatron's bias-dropout-add with a fixed dropout probability.

    Returns:
        A function of `training` and a fusion flag, which returns a function of `([s, b, h], bias or
        None)`, the residual `[s, b, h]` and a probability, which is ignored.
    """

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(mixed: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
            # Without bias and dropout a single kernel remains, and fusion gains nothing.
            many = mixed[1] is not None or (training and dropout > 0.0)
            chosen = get_bias_dropout_add(training, fused or (many and is_fused(residual)))
            # The masks of split tokens must differ.
            draws_apart = training and dropout > 0.0 and splits_tokens(config)
            with rank_local_rng(group.rank(), group.size() if draws_apart else 1):
                result: Tensor = chosen(mixed, residual, dropout)
            return result

        return add

    return build
