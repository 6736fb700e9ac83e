"""Correlation of the last layer's tokens by position, within an image and between two images.

This is Pearson's correlation over the features of tokens. For its source, see docs/evaluation.md.

Legend: b images, r² positions, h hidden size.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.inference import Inference

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_BATCH_SIZE = 64


@dataclass(frozen=True)
class Correlations:
    """Mean Pearson correlation of tokens at two positions, `[r², r²]` each.

    Attributes:
        within: in the same image.
        between: in an image and the next one.
    """

    within: Tensor
    between: Tensor

    def means(self) -> tuple[float, float]:
        """Return the means over pairs of different positions, within and between."""
        pairs = ~torch.eye(len(self.within), dtype=torch.bool)
        return float(self.within[pairs].mean()), float(self.between[pairs].mean())


def measure_correlations(
    runner: Inference, objective: Any, dataset: ShardDataset, *, num_images: int
) -> Correlations:
    """Correlate the tokens of held-out images, in pairs from the same batch."""
    sums: list[Tensor] = []
    limit = min(num_images, len(dataset))
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE, limit=limit):
        inputs = objective.backbone.feature_inputs(batch.to(runner.context.device))
        tokens = last_tokens(runner, inputs)
        side = math.isqrt(tokens.shape[1])
        cells = tokens[:, -(side**2) :]
        parts = torch.stack([correlation(cells, cells), correlation(cells, cells.roll(-1, 0))])
        sums = [parts * len(batch) if not sums else sums[0] + parts * len(batch)]
    within, between = (sums[0] / limit).cpu()
    return Correlations(within, between)


def last_tokens(runner: Inference, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the output of the last norm, float32 `[b, s, h]`."""
    kept: list[Tensor] = []
    norm = runner.head.feature_norm
    with norm.register_forward_hook(lambda _, __, output: kept.append(output)):
        runner.predictions(inputs)
    return kept[0].float().transpose(0, 1)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation over channels of `[b, r², h]`, averaged over b: `[r², r²]`."""

    def standard(tokens: Tensor) -> Tensor:
        centered = tokens - tokens.mean(-1, keepdim=True)
        return centered / centered.norm(dim=-1, keepdim=True).clamp(min=1e-12)

    return (standard(first) @ standard(second).transpose(1, 2)).mean(0)


def has_blocks(objective: Trainable) -> bool:
    """Return whether the model has blocks; raise UserError, which says why, if it has none."""
    objective.backbone.composition()
    return True


def correlation_figure(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Draw the correlation of the last layer's tokens of held-out images."""
    found = measure_correlations(
        subject.runner, subject.objective, subject.images, num_images=options.num_images
    )
    within, between = found.means()
    line = f"mean correlation of two positions: same image {within:.3f}, two images {between:.3f}"
    picture = draw_correlations(found, name=subject.name)
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


def draw_correlations(found: Correlations, *, name: str) -> Figure:
    """Draw a grid of grids: for each position its correlation with all positions."""
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
