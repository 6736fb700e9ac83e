"""Dropout: of whole parts of a block, of features split over processes, and of one part's output.

"Deep Networks with Stochastic Depth" (Huang et al., 2016), drawn anew for each image and part. What
is left out follows from seed, sample and block, so every layout leaves out the same. The samples'
numbers travel with the hidden states: in training the first layer takes them last among its inputs.

Legend: b images, p parts of a block.
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
from megavis.parallel.random import rank_local_rng, uniform

SAMPLES = "samples"
"""Name under which the samples' numbers travel, int64 `[b]`; zeros outside of training."""


def drop_path_of(number: int, num_layers: int, rate: float) -> float:
    """Return the probability for block `number`, from 1: none in the first, `rate` in the last.

    The paper's linear rule, which DeiT and MAE count from the first block.
    """
    return rate * (number - 1) / max(1, num_layers - 1)


def draw_kept(
    samples: Tensor, *, num_parts: int, rate: float, seed: int, block: int | str
) -> Tensor:
    """Return what each part of a block is multiplied by: float32 `[p, b, 1]`, 0 or 1 / (1 - rate).

    Args:
        samples: int64 `[b]`.
        num_parts: p.
        rate: probability of 0.
        seed: of the run.
        block: number of the block, with the name of its stack where it is not the first.
    """
    draws = uniform(samples, num_parts, seed=seed, purpose=f"drop-path-{block}")
    return ((draws >= rate).float() / (1.0 - rate)).t()[:, :, None]


def carries_samples(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds the same first layer, which hands on the samples' numbers as well.

    By hooks and not by a module around it, so that parameters keep their names.
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
    """Dropout on features of which each process of the tensor group holds others."""

    def __init__(self, probability: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.probability, self.group = probability, group

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of this process's part, in training alone."""
        if not self.training:
            return x
        with rank_local_rng(self.group.rank(), self.group.size()):
            return F.dropout(x, self.probability)


def add_to_residual(dropout: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return Megatron's sum of bias, dropout and residual with a probability of its own.

    Args:
        dropout: probability that a number of the part is dropped.

    Returns:
        What Megatron calls with `training` and a fusion flag, and then with `([s, b, h], bias or
        None)`, the residual `[s, b, h]` and a probability, which is not used.
    """

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(mixed: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
            # Without bias and dropout one kernel is left.
            many = mixed[1] is not None or (training and dropout > 0.0)
            chosen = get_bias_dropout_add(training, fused or (many and is_fused(residual)))
            result: Tensor = chosen(mixed, residual, dropout)
            return result

        return add

    return build
