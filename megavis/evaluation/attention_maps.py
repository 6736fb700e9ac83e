"""Average attention weights of each head by offset from the query, and their entropy.

The weights are computed from the projections of each block, since fused kernels do not return them.
For the source of these figures, see docs/evaluation.md.

Legend: b images, n heads, s tokens, the last r² of them a square grid of cells, d head size.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megavis.composition.composition import Composition
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.core import Block
from megavis.model.inference import Inference

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MAPS_PER_BATCH = 16


@dataclass(frozen=True)
class AttentionMaps:
    """Mean attention over images, for every layer and head.

    Attributes:
        maps: `[L, n, 2r - 1, 2r - 1]`, mean weight by row and column offset of the key; the center
            is the query's own cell.
        entropies: `[L, n]` in nats, the mean over queries of -Σ α log α; log s for uniform
            attention.
    """

    maps: Tensor
    entropies: Tensor


def measure_attention(
    runner: Inference, objective: Trainable, dataset: ShardDataset, *, num_images: int
) -> AttentionMaps:
    """Measure attention with all tokens visible; raise UserError if causal or rotary."""
    paper = objective.backbone.composition()
    _check_visibility(paper)
    total: AttentionMaps | None = None
    limit = min(num_images, len(dataset))
    for batch in evaluation_batches(dataset, batch_size=_MAPS_PER_BATCH, limit=limit):
        inputs = paper.feature_inputs(batch.to(runner.context.device))
        found = [_sums(weights) for weights in attention_weights(runner, inputs)]
        maps, entropies = (torch.stack(parts) for parts in zip(*found, strict=True))
        if total is not None:
            maps, entropies = total.maps + maps, total.entropies + entropies
        total = AttentionMaps(maps, entropies)
    assert total is not None
    return AttentionMaps(total.maps / limit, total.entropies / limit)


def _check_visibility(paper: Composition) -> None:
    if paper.core.visibility_kind not in ("full", "context"):
        raise UserError("attention maps need a model with bidirectional attention")
    if "coordinates" in paper.carried_names and paper.relative_grid is None:
        raise UserError("attention maps do not support rotary positions")


def attention_weights(runner: Inference, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return softmax(q · k / √d) of each block, `[b, n, s, keys]`, keys in their original order.

    Relative position biases are included.
    """
    parts: list[dict[str, Any]] = []
    blocks = [layer for layer in runner.layers.of_phase("step") if isinstance(layer, Block)]
    with contextlib.ExitStack() as hooks:
        for block in blocks:
            parts.append({})
            for name in ("linear_q", "linear_kv", "relative_bias"):
                module = getattr(block.self_attention, name)
                if module is not None:
                    hook = module.register_forward_hook(_keeper(parts[-1], name))
                    hooks.enter_context(hook)
        runner.predictions(inputs)
    size = blocks[0].self_attention.head_size
    weights = []
    for part in parts:
        query = part["linear_q"][0].unflatten(2, (-1, size)).permute(1, 2, 0, 3)
        key = part["linear_kv"][0].unflatten(2, (-1, 2, size))[..., 0, :].permute(1, 2, 0, 3)
        logits = query.float() @ key.float().transpose(2, 3) / math.sqrt(size)
        weights.append((logits + part.get("relative_bias", 0.0)).softmax(-1))
    return weights


def _keeper(kept: dict[str, Any], name: str) -> Callable[..., None]:
    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept[name] = output

    return keep


def _sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return relative maps `[n, 2r - 1, 2r - 1]` and entropies `[n]`, summed over images."""
    entropies = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1).sum(0)
    return relative_map(weights).sum(0).cpu(), entropies.cpu()


def relative_map(weights: Tensor) -> Tensor:
    """Average weights `[..., s, s]` over cells with the same offset: `[..., 2r - 1, 2r - 1]`.

    Tokens before the grid, such as a class token, are ignored.
    """
    side = math.isqrt(weights.shape[-1])
    cells = weights[..., -(side**2) :, -(side**2) :].flatten(-2)
    place = torch.arange(side**2, device=weights.device)
    rows, columns = place // side, place % side
    width = 2 * side - 1
    offset = (rows[None] - rows[:, None] + side - 1) * width + (
        columns[None] - columns[:, None] + side - 1
    )
    index = offset.flatten()
    sums = torch.zeros(*cells.shape[:-1], width**2, device=cells.device)
    sums.scatter_add_(-1, index.expand_as(cells), cells)
    counts = torch.bincount(index, minlength=width**2)
    return (sums / counts).unflatten(-1, (width, width))


def sees_both_ways(objective: Trainable) -> bool:
    """Return whether attention is bidirectional, without rotary positions."""
    _check_visibility(objective.backbone.composition())
    return True


def attention_figure(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Draw the attention of every head, averaged over held-out images."""
    maps = measure_attention(
        subject.runner, subject.objective, subject.images, num_images=options.num_images
    )
    rows = attention_rows(maps)
    low = min(rows, key=lambda row: float(row["entropy"]))
    line = (
        f"entropy {min(r['entropy'] for r in rows):.2f} to {max(r['entropy'] for r in rows):.2f}"
        f" nats; lowest in layer {low['layer']}, head {low['head']}, with a mean distance of"
        f" {low['mean_distance']:.1f} cells"
    )
    return RenderedFigure(draw_attention(maps, name=subject.name), rows, [line])


def attention_rows(maps: AttentionMaps) -> list[Row]:
    """Return one row per head: entropy and mean attention distance in cells."""
    middle = (maps.maps.shape[-1] - 1) / 2
    steps = torch.arange(maps.maps.shape[-1]) - middle
    distances = (steps[:, None].square() + steps[None].square()).sqrt()
    shares = maps.maps / maps.maps.sum(dim=(-2, -1), keepdim=True)
    far = (shares * distances).sum(dim=(-2, -1))
    return [
        {
            "layer": layer + 1,
            "head": head,
            "entropy": float(maps.entropies[layer, head]),
            "mean_distance": float(far[layer, head]),
        }
        for layer in range(len(far))
        for head in range(far.shape[1])
    ]


def draw_attention(maps: AttentionMaps, *, name: str) -> Figure:
    """Draw every head with its entropy; one row per layer."""
    from matplotlib.figure import Figure

    layers, heads = maps.entropies.shape
    figure = Figure(figsize=(1.1 * heads + 0.6, 1.25 * layers + 0.5), dpi=110, layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            axes.imshow(maps.maps[layer, head].numpy(), cmap="viridis")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"{float(maps.entropies[layer, head]):.2f}", fontsize=7)
        grid[layer][0].set_ylabel(f"layer {layer + 1}", fontsize=8)
    figure.suptitle(f"{name}: attention by offset, entropy in nats", fontsize="medium")
    return figure
