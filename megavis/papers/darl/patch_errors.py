"""Prediction error of the patch at each place of an order (DARL, figures 10 to 14)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megavis.composition.objective import Objective
from megavis.composition.trainable import Trainable
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row
from megavis.model.inference import Inference
from megavis.schedules.orders import to_raster

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BATCH_SIZE = 64


@dataclass(frozen=True)
class PatchErrors:
    """Means over images.

    Attributes:
        by_place: `[T]`, first place first.
        by_cell: `[T]`, in raster order.
        places: `[T]`, the mean place of each cell.
    """

    by_place: Sequence[float]
    by_cell: Sequence[float]
    places: Sequence[float]

    @property
    def side(self) -> int:
        """Cells of a row."""
        return round(len(self.by_cell) ** 0.5)


def measure_patches(
    runner: Inference, objective: Objective, dataset: ShardDataset, *, num_images: int
) -> PatchErrors:
    """Score held-out images; noise is that of training, a function of seed and image.

    Args:
        runner: the model, on one process.
        objective: predicts the tokens of an order one by one.
        dataset: the images.
        num_images: at most.

    Raises:
        UserError: the paper does not predict one token after the other.
    """
    sums: list[Tensor] = []
    count = min(num_images, len(dataset))
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE, limit=count):
        sequence = objective.sequence(batch.to(runner.context.device))
        predictions = runner.predictions(sequence.inputs)
        per_token_loss = objective.token_losses(predictions, sequence.targets).double()
        order = objective.schedule.draw(batch.sample_index.to(per_token_loss.device)).order
        order = order.expand(len(per_token_loss), -1)
        places = order.argsort(1).double()
        parts = torch.stack(
            [per_token_loss.sum(0), to_raster(per_token_loss, order).sum(0), places.sum(0)]
        )
        sums = [parts if not sums else sums[0] + parts]
    by_place, by_cell, means = (sums[0] / count).tolist()
    return PatchErrors(by_place, by_cell, means)


def applies(objective: Trainable) -> bool:
    """Return whether tokens are predicted one after the other."""
    return objective.backbone.composition().schedule.is_sequential


def draw_patches(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Measure and draw; raises UserError where the run's objective does not allow it."""
    errors = measure_patches(
        subject.runner,
        subject.objective.backbone.composition(),
        subject.images,
        num_images=options.num_images,
    )
    return RenderedFigure(draw_patch_errors(errors, name=subject.name), patch_rows(errors))


def patch_rows(errors: PatchErrors) -> list[Row]:
    """Return one row a place: its error, and cell, row, column and error in raster order."""
    return [
        {
            "place": i,
            "error": error,
            "cell_row": i // errors.side,
            "cell_column": i % errors.side,
            "cell_mean_place": errors.places[i],
            "cell_error": errors.by_cell[i],
        }
        for i, error in enumerate(errors.by_place)
    ]


def draw_patch_errors(errors: PatchErrors, *, name: str) -> Figure:
    """Draw the order, and the error by place (figure 10) and by cell (figures 12 and 14).

    Args:
        errors: as measured.
        name: of the run, for the title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), dpi=150, layout="constrained")
    line, order, cells = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    line.plot(errors.by_place, color="#1f5fa8")
    line.set_xlabel("place in the order")
    line.set_ylabel("mean squared error a number")
    line.grid(alpha=0.25)
    line.spines[["top", "right"]].set_visible(False)
    _draw_cells(figure, order, errors.places, errors.side, "place of each patch")
    _draw_cells(figure, cells, errors.by_cell, errors.side, "error of each patch")
    figure.suptitle(name, fontsize="medium")
    return figure


def _draw_cells(figure: Figure, axes: Axes, values: Sequence[float], side: int, title: str) -> None:
    shown = torch.tensor(values).view(side, side).numpy()
    figure.colorbar(axes.imshow(shown, cmap="viridis"), ax=axes, shrink=0.8)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize="small")
