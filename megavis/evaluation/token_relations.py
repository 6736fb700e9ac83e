"""Relations of a layer's tokens by position: attention of each head, correlation of features.

Attention weights are averaged by offset from the query, with their entropy. They are computed from
the queries and keys of each block, since fused kernels do not return them. The correlation is
Pearson's over the features of the last layer's tokens, within an image and between two images. For
the sources of these figures, see docs/evaluation.md.

Legend: b images, n heads, s tokens, the last r² of them of a square grid of cells, d head size,
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
from torch import Tensor

from megavis.composition.finetuned import finetuned_of
from megavis.composition.model import Model, model_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, representative, shuffled
from megavis.data.loading.loader import Batch, evaluation_batches
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.core import Block
from megavis.model.inference import Inference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAPS_PER_BATCH, _BATCH_SIZE = 16, 64
"""Images at once: attention weights take more memory than the last layer's features."""


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
    """Measure attention with all tokens visible.

    Raises:
        UserError: not all tokens see each other, or `has_square_features` refuses the model.
    """
    model = model_of(objective)
    sees_both_ways(objective)
    total: AttentionMaps | None = None
    limit = min(num_images, len(dataset))
    images = representative(dataset, limit)
    for batch in evaluation_batches(images, batch_size=_MAPS_PER_BATCH, limit=limit):
        batch = batch.to(inference.context.device)
        cells = _cells(model, batch)
        every = attention_weights(inference, model.feature_inputs(batch))
        found = [_sums(weights, cells) for weights in every]
        maps, entropies = (torch.stack(parts) for parts in zip(*found, strict=True))
        if total is not None:
            maps, entropies = total.maps + maps, total.entropies + entropies
        total = AttentionMaps(maps, entropies)
    assert total is not None
    return AttentionMaps(total.maps / limit, total.entropies / limit)


def attention_weights(inference: Inference, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return softmax(q · k / √d + bias) of each block that provides features.

    Blocks of a decoder and of an encoder that conditions the model provide none.

    Args:
        inputs: for features.

    Returns:
        `[b, n, s, keys]` for each block, keys in their original order.
    """
    kept: list[Tensor] = []
    blocks = [each for each in inference.layers.feature_layers() if isinstance(each, Block)]
    with contextlib.ExitStack() as restored:
        for block in blocks:
            # Where they are multiplied, so after norms and rotations, whatever these are.
            attention = block.self_attention
            attention.attend = _keeping(attention.attend, kept)
            restored.callback(delattr, attention, "attend")
        inference.features(inputs)
    return kept


def _keeping(attend: Callable[..., Tensor], kept: list[Tensor]) -> Callable[..., Tensor]:
    """Return `Attention.attend` that also keeps its weights."""

    def keep(
        query: Tensor, key: Tensor, value: Tensor, context: Any, bias: Tensor | None = None
    ) -> Tensor:
        logits = query.float() @ key.float().transpose(2, 3) / math.sqrt(query.shape[-1])
        kept.append((logits if bias is None else logits + bias).softmax(-1))
        return attend(query, key, value, context, bias)

    return keep


def _cells(model: Model, batch: Batch) -> Tensor:
    """Return the row of each cell, in raster order, among the last n: int64 `[b, n]`."""
    index = batch.sample_index
    if not model.has_random_features:
        # As `feature_inputs`, which then ignores the samples' own.
        index = torch.zeros_like(index)
    order = model.schedule.for_features(index).order.expand(len(index), -1)
    if not model.asks.permutes:
        return torch.arange(order.shape[1], device=order.device).expand_as(order)
    return order.argsort(1)


def _by_cell(values: Tensor, cells: Tensor, dim: int) -> Tensor:
    """Return values `[b, ..., s, ...]` of the cells in raster order along a dimension.

    Tokens before the grid, such as a class token, are left out.
    """
    last = values.narrow(dim, values.shape[dim] - cells.shape[1], cells.shape[1])
    shape = [len(cells), *[1] * (values.ndim - 1)]
    shape[dim] = cells.shape[1]
    return last.gather(dim, cells.view(shape).expand_as(last))


def _sums(weights: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return relative maps `[n, 2r - 1, 2r - 1]` and entropies `[n]`, summed over images."""
    entropies = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1).sum(0)
    by_cell = _by_cell(_by_cell(weights, cells, 2), cells, 3)
    return relative_map(by_cell).sum(0).cpu(), entropies.cpu()


def relative_map(weights: Tensor) -> Tensor:
    """Average weights `[..., r², r²]` over cells with the same offset: `[..., 2r - 1, 2r - 1]`."""
    side = math.isqrt(weights.shape[-1])
    cells = weights.flatten(-2)
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
    """Return True if all blocks see all tokens of a square grid; raise UserError otherwise."""
    if model_of(objective).core.visibility_kind not in ("full", "context"):
        raise UserError("attention maps need a model with bidirectional attention")
    tuned = finetuned_of(objective)
    if tuned is not None and tuned.settings.layer == 0:
        raise UserError("attention maps need a block, and finetune.layer is 0")
    return has_square_features(objective)


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
    """Return one row per head: entropy, and distance in cells, the mean over queries."""
    side = (maps.maps.shape[-1] + 1) // 2
    steps = torch.arange(1 - side, side)
    distances = (steps[:, None].square() + steps[None].square()).sqrt()
    # A map has means over the pairs of cells of each offset: the farther, the fewer.
    pairs = side - steps.abs()
    sums = maps.maps * pairs[:, None] * pairs
    shares = sums / sums.sum(dim=(-2, -1), keepdim=True)
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
    inference: Inference, objective: Trainable, dataset: ShardDataset, *, num_images: int
) -> Correlations:
    """Correlate the tokens of each held-out image, and of it and the next one in random order.

    For models that `has_square_features` accepts.

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
    model = model_of(objective)
    # Neighbours in a folder sorted by class are not "two random images".
    images = shuffled(dataset)
    for batch in evaluation_batches(images, batch_size=_BATCH_SIZE, limit=limit):
        batch = batch.to(inference.context.device)
        tokens = inference.last_features(model.feature_inputs(batch)).float()
        cells = _by_cell(tokens, _cells(model, batch), 1)
        within = within + len(cells) * correlation(cells, cells).cpu()
        chain = cells if last is None else torch.cat([last, cells])
        between = between + (len(chain) - 1) * correlation(chain[:-1], chain[1:]).cpu()
        last = cells[-1:]
    return Correlations(within / limit, between / (limit - 1))


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation over channels of `[b, r², h]`, averaged over b: `[r², r²]`."""

    def standard(tokens: Tensor) -> Tensor:
        centered = tokens - tokens.mean(-1, keepdim=True)
        return centered / centered.norm(dim=-1, keepdim=True).clamp(min=1e-12)

    return (standard(first) @ standard(second).transpose(1, 2)).mean(0)


def has_square_features(objective: Trainable) -> bool:
    """Return True if the features are of a square grid of tokens; raise UserError otherwise."""
    model = model_of(objective)
    height, width = model.reads.grid
    if model.grammar.asks.kind == "instruct":
        raise UserError("its rows alternate between places and tokens, which are no grid")
    if height != width:
        raise UserError(f"its tokens are a grid of {height} × {width}, which is not square")
    return has_features(objective)


def has_features(objective: Trainable) -> bool:
    """Return True if the model has features of images; raise UserError with the reason if not."""
    model_of(objective)
    objective.check_features()
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
