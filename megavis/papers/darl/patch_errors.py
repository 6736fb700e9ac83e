"""Figure of prediction errors by position in the order (DARL, figures 10 to 14).

Legend: T patches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from megavis.composition.model import Model, model_of
from megavis.composition.trainable import Trainable
from megavis.data.loading.dataset import ShardDataset, representative
from megavis.data.loading.loader import evaluation_batches
from megavis.densities.squared_error import SquaredError
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.inference import Inference
from megavis.schedules.orders import to_raster

_BATCH_SIZE = 64


@dataclass(frozen=True)
class PatchErrors:
    """Errors averaged over images.

    Attributes:
        by_place: error at each position of the order, `[T]`.
        by_cell: error of each cell in raster order, `[T]`.
        places: mean position of each cell in the order, `[T]`.
        columns: cells of a row.
        measure: what is averaged.
    """

    by_place: Sequence[float]
    by_cell: Sequence[float]
    places: Sequence[float]
    columns: int
    measure: str = "mean loss"


def measure_patches(
    inference: Inference, objective: Model, dataset: ShardDataset, *, num_images: int
) -> PatchErrors:
    """Compute errors on held-out images; noise is a function of seed and image as in training.

    Args:
        inference: the model, on one process.
        objective: a paper with a sequential schedule.

    Raises:
        UserError: the paper does not predict one token at a time.
    """
    sums: list[Tensor] = []
    count = min(num_images, len(dataset))
    images = representative(dataset, count)
    for batch in evaluation_batches(images, batch_size=_BATCH_SIZE, limit=count):
        sequence = objective.sequence(batch.to(inference.context.device))
        predictions = inference.predictions(sequence.inputs)
        per_token_loss = objective.token_losses(predictions, sequence.targets).double()
        order = objective.schedule.draw(batch.sample_index.to(per_token_loss.device)).order
        order = order.expand(len(per_token_loss), -1)
        places = order.argsort(1).double()
        parts = torch.stack(
            [per_token_loss.sum(0), to_raster(per_token_loss, order).sum(0), places.sum(0)]
        )
        sums = [parts if not sums else sums[0] + parts]
    by_place, by_cell, means = (sums[0] / count).tolist()
    columns, measure = objective.predicts.grid[1], "mean loss"
    if isinstance(objective.density, SquaredError) and objective.density.norm == "l2":
        measure = "mean squared error"
    return PatchErrors(by_place, by_cell, means, columns, measure)


def applies(objective: Trainable) -> bool:
    """Return whether all tokens are predicted one at a time, and none belongs to a prefix."""
    schedule = model_of(objective).schedule
    return schedule.is_sequential and not schedule.needs_given


def plot_patches(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Measure and plot; raise UserError if the run's objective does not support it."""
    errors = measure_patches(
        subject.inference,
        model_of(subject.objective),
        subject.images,
        num_images=options.num_images,
    )
    return RenderedFigure(plot_patch_errors(errors, name=subject.name), patch_rows(errors))


def patch_rows(errors: PatchErrors) -> list[Row]:
    """Return one row per position i: its error, and row, column and error of raster cell i."""
    return [
        {
            "place": i,
            "error": error,
            "cell_row": i // errors.columns,
            "cell_column": i % errors.columns,
            "cell_mean_place": errors.places[i],
            "cell_error": errors.by_cell[i],
        }
        for i, error in enumerate(errors.by_place)
    ]


def plot_patch_errors(errors: PatchErrors, *, name: str) -> Figure:
    """Plot the order, and the error by position (figure 10) and by cell (figures 12 and 14)."""
    figure = Figure(figsize=(11.0, 3.6), dpi=150, layout="constrained")
    line, order, cells = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    line.plot(errors.by_place, color="#1f5fa8")
    line.set_xlabel("position in the order")
    line.set_ylabel(errors.measure)
    line.grid(alpha=0.25)
    line.spines[["top", "right"]].set_visible(False)
    _plot_cells(figure, order, errors.places, errors.columns, "position of each patch")
    _plot_cells(figure, cells, errors.by_cell, errors.columns, "error of each patch")
    figure.suptitle(name, fontsize="medium")
    return figure


def _plot_cells(
    figure: Figure, axes: Axes, values: Sequence[float], columns: int, title: str
) -> None:
    shown = torch.tensor(values).view(-1, columns).numpy()
    figure.colorbar(axes.imshow(shown, cmap="viridis"), ax=axes, shrink=0.8)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize="small")
