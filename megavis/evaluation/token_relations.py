"""Relations of a layer's tokens by position: attention of each head, correlation of features.

Attention weights are averaged by offset from the query, with their entropy. They are computed from
the projections of each block, since fused kernels do not return them. The correlation is Pearson's
over the features of the last layer's tokens, within an image and between two images. For the
sources of these figures, see docs/evaluation.md.

Legend: b images, n heads, s tokens, the last r² of them a square grid of cells, d head size,
h hidden size.
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

from megavis.composition.model import Model, model_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, representative, shuffled
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.attention import projected_heads
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
    inference: Inference, objective: Trainable, dataset: ShardDataset, *, num_images: int
) -> AttentionMaps:
    """Measure attention with all tokens visible; raise UserError if causal or rotary."""
    model = model_of(objective)
    _check_visibility(model)
    total: AttentionMaps | None = None
    limit = min(num_images, len(dataset))
    images = representative(dataset, limit)
    for batch in evaluation_batches(images, batch_size=_MAPS_PER_BATCH, limit=limit):
        inputs = model.feature_inputs(batch.to(inference.context.device))
        found = [_sums(weights) for weights in attention_weights(inference, inputs)]
        maps, entropies = (torch.stack(parts) for parts in zip(*found, strict=True))
        if total is not None:
            maps, entropies = total.maps + maps, total.entropies + entropies
        total = AttentionMaps(maps, entropies)
    assert total is not None
    return AttentionMaps(total.maps / limit, total.entropies / limit)


def _check_visibility(model: Model) -> None:
    if model.core.visibility_kind not in ("full", "context"):
        raise UserError("attention maps need a model with bidirectional attention")
    if "coordinates" in model.carried_names and model.relative_grid is None:
        raise UserError("attention maps do not support rotary positions")


def attention_weights(inference: Inference, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return softmax(q · k / √d) of each block, `[b, n, s, keys]`, keys in their original order.

    Relative position biases are included.
    """
    parts: list[dict[str, Any]] = []
    blocks = [layer for layer in inference.layers.of_phase("step") if isinstance(layer, Block)]
    with contextlib.ExitStack() as hooks:
        for block in blocks:
            parts.append({})
            for name in ("linear_qkv", "relative_bias"):
                module = getattr(block.self_attention, name)
                if module is not None:
                    hook = module.register_forward_hook(_keeper(parts[-1], name))
                    hooks.enter_context(hook)
        inference.predictions(inputs)
    size = blocks[0].self_attention.head_size
    weights = []
    for part in parts:
        query, key, _ = projected_heads(part["linear_qkv"], size)
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
    _check_visibility(model_of(objective))
    return True


def attention_figure(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Plot the attention of every head, averaged over held-out images."""
    maps = measure_attention(
        subject.inference, subject.objective, subject.images, num_images=options.num_images
    )
    rows = attention_rows(maps)
    low = min(rows, key=lambda row: float(row["entropy"]))
    line = (
        f"entropy {min(r['entropy'] for r in rows):.2f} to {max(r['entropy'] for r in rows):.2f}"
        f" nats; lowest in layer {low['layer']}, head {low['head']}, with a mean distance of"
        f" {low['mean_distance']:.1f} cells"
    )
    return RenderedFigure(plot_attention(maps, name=subject.name), rows, [line])


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


def plot_attention(maps: AttentionMaps, *, name: str) -> Figure:
    """Plot every head with its entropy; one row per layer."""
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


_BATCH_SIZE = 64


@dataclass(frozen=True)
class Correlations:
    """Mean Pearson correlation of tokens at two positions, `[r², r²]` each.

    Attributes:
        within: in the same image.
        between: in an image and another one.
    """

    within: Tensor
    between: Tensor

    def means(self) -> tuple[float, float]:
        """Return the means over pairs of different positions, within and between."""
        pairs = ~torch.eye(len(self.within), dtype=torch.bool)
        return float(self.within[pairs].mean()), float(self.between[pairs].mean())


def measure_correlations(
    inference: Inference, objective: Any, dataset: ShardDataset, *, num_images: int
) -> Correlations:
    """Correlate the tokens of each held-out image, and of it and the next one in random order.

    Raises:
        UserError: there are fewer than two images.
    """
    limit = min(num_images, len(dataset))
    if limit < 2:
        raise UserError(
            "--num-images must be at least 2, and so must be the held-out images: tokens are also"
            " correlated between two images"
        )
    within = between = torch.zeros(())
    last: Tensor | None = None
    # Neighbours in a folder sorted by class are not "two random images".
    images = shuffled(dataset)
    for batch in evaluation_batches(images, batch_size=_BATCH_SIZE, limit=limit):
        inputs = objective.backbone.feature_inputs(batch.to(inference.context.device))
        tokens = last_tokens(inference, inputs)
        side = math.isqrt(tokens.shape[1])
        cells = tokens[:, -(side**2) :]
        within = within + len(cells) * correlation(cells, cells).cpu()
        chain = cells if last is None else torch.cat([last, cells])
        between = between + (len(chain) - 1) * correlation(chain[:-1], chain[1:]).cpu()
        last = cells[-1:]
    return Correlations(within / limit, between / (limit - 1))


def last_tokens(inference: Inference, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the output of the last norm, float32 `[b, s, h]`."""
    kept: list[Tensor] = []
    norm = inference.head.feature_norm
    with norm.register_forward_hook(lambda _, __, output: kept.append(output)):
        inference.predictions(inputs)
    return kept[0].float().transpose(0, 1)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation over channels of `[b, r², h]`, averaged over b: `[r², r²]`."""

    def standard(tokens: Tensor) -> Tensor:
        centered = tokens - tokens.mean(-1, keepdim=True)
        return centered / centered.norm(dim=-1, keepdim=True).clamp(min=1e-12)

    return (standard(first) @ standard(second).transpose(1, 2)).mean(0)


def has_blocks(objective: Trainable) -> bool:
    """Return whether the model has blocks; raise UserError with the reason if it has none."""
    model_of(objective)
    return True


def correlation_figure(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Plot the correlation of the last layer's tokens of held-out images."""
    found = measure_correlations(
        subject.inference, subject.objective, subject.images, num_images=options.num_images
    )
    within, between = found.means()
    line = f"mean correlation of two positions: same image {within:.3f}, two images {between:.3f}"
    picture = plot_correlations(found, name=subject.name)
    return RenderedFigure(picture, correlation_rows(found), [line])


def correlation_rows(found: Correlations) -> list[Row]:
    """Return one row per rounded distance in cells, with both mean correlations."""
    side = math.isqrt(len(found.within))
    place = torch.arange(side**2)
    spots = torch.stack([place // side, place % side], dim=1).double()
    distances = torch.cdist(spots, spots).round().long()
    return [
        {
            "distance": distance,
            "within": float(found.within[distances == distance].mean()),
            "between": float(found.between[distances == distance].mean()),
        }
        for distance in range(int(distances.max()) + 1)
        if bool((distances == distance).any())
    ]


def plot_correlations(found: Correlations, *, name: str) -> Figure:
    """Plot a grid of grids: for each position its correlation with all positions."""
    from matplotlib.figure import Figure

    side = math.isqrt(len(found.within))
    figure = Figure(figsize=(10.0, 5.0), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2)
    for panel, values, title in zip(
        axes, (found.within, found.between), ("same image", "two images"), strict=True
    ):
        grid = values.view(side, side, side, side).permute(0, 2, 1, 3).reshape(side**2, side**2)
        picture = panel.imshow(grid.numpy(), cmap="coolwarm", vmin=-1, vmax=1)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set_title(title, fontsize="small")
    figure.colorbar(picture, ax=axes, shrink=0.8)
    figure.suptitle(f"{name}: correlation of the last layer's tokens", fontsize="medium")
    return figure
