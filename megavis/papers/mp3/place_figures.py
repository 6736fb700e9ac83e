"""Figures of predicted patch positions: accuracy, and reassembled images.

Legend: b images, n patches and positions of an image, c context patches, d values of a patch, h and
w height and width in pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from megavis.composition.asking import InContext
from megavis.composition.model import Model
from megavis.composition.tokens import Frames, Patches
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, Subset, representative
from megavis.data.loading.loader import evaluation_batches, read_round_robin
from megavis.densities.categorical import Place
from megavis.evaluation.figures import FigureInput, RenderedFigure, legend_below, plain_axes
from megavis.evaluation.results import PositionAccuracy
from megavis.model.inference import Inference
from megavis.sampling.pictures import hide, image_grid, pixels_of
from megavis.schedules.masked import Context
from megavis.schedules.orders import gather_tokens

_BATCH_SIZE = 64
_GREEN = (0, 200, 0)
_RATIOS = (0.0, 0.25, 0.5, 0.75)
_DRAWN = 8


@dataclass(frozen=True)
class Places:
    """The choices of a paper that predicts the position of every patch."""

    model: Model
    reads: Frames | Patches
    schedule: Context
    asks: InContext
    density: Place

    @classmethod
    def of(cls, objective: Trainable) -> Places:
        """Return the choices of an objective.

        Raises:
            UserError: it predicts no positions, or only given a class.
        """
        match objective:
            case Model(
                reads=Frames() | Patches() as reads,
                schedule=Context() as schedule,
                asks=InContext() as asks,
                density=Place() as density,
            ):
                objective.check_unlabelled()
                return cls(objective, reads, schedule, asks, density)
        name = objective.config.objective.name
        raise UserError(f"{name} does not predict the positions of patches")

    @property
    def num_places(self) -> int:
        """Patches n of an image."""
        return self.schedule.num_positions

    @property
    def num_placed(self) -> int:
        """Number of context patches, the first ones, that get their position."""
        return self.schedule.num_placed

    @property
    def mask_ratio(self) -> float:
        """Share of the patches outside the context in training."""
        return self.schedule.mask_ratio

    def patches_of(self, images: Tensor) -> Tensor:
        """Cut samples into patches float32 `[b, n, d]`; raise UserError if they do not fit."""
        return self.reads.of(images)

    def images_of(self, patches: Tensor) -> Tensor:
        """Invert `patches_of`; raise UserError for frames of a spectrogram."""
        return self.reads.to_images(patches)

    def context_of(self, sample_index: Tensor, mask_ratio: float) -> Tensor:
        """Draw the context of samples `[b]`: int64 `[b, c]`, distinct patches."""
        arrangement = self.schedule.draw(sample_index, mask_ratio)
        return arrangement.order[:, : arrangement.num_content]

    def inputs_with(self, patches: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return model inputs for patches `[b, n, d]` with the context int64 `[b, c]`; no class."""
        rows = self.asks.rows_of(patches, context, self.num_placed)
        known = self.model.condition.given({}, len(patches), patches.device)
        return (*self.model.numbered(rows), *known)

    def outputs(self, predictions: Any) -> Tensor:
        """Return the position logits of each patch, `[b, n, n]`."""
        return self.density.outputs(predictions)


def predicted_places(
    inference: Inference, objective: Places, patches: Tensor, context: Tensor
) -> Tensor:
    """Return the most likely position of each patch, int64 `[b, n]`.

    Args:
        inference: the model, on one process.
        patches: `[b, n, d]`.
        context: indices of the context patches, int64 `[b, c]`.
    """
    inputs = objective.inputs_with(patches, context)
    return objective.outputs(inference.predictions(inputs)).argmax(-1)


def position_accuracy(
    inference: Inference,
    objective: Places,
    dataset: ShardDataset | Subset,
    *,
    mask_ratio: float,
    num_images: int,
) -> PositionAccuracy:
    """Measure accuracy at one η; contexts are functions of the run's seed and the sample.

    Patches whose position is given are not counted.
    """
    right = torch.zeros(2, dtype=torch.float64)
    count = torch.zeros(2, dtype=torch.float64)
    places = objective.num_places
    limit = min(num_images, len(dataset))
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE, limit=limit):
        batch = batch.to(inference.context.device)
        context = objective.context_of(batch.sample_index, mask_ratio)
        patches = objective.patches_of(batch.inputs)
        found = predicted_places(inference, objective, patches, context).cpu()
        hits = (found == torch.arange(places)).double()
        seen = torch.zeros(len(hits), places, dtype=torch.float64)
        seen.scatter_(1, context.cpu(), 1.0)
        counted = torch.ones_like(seen).scatter_(1, context[:, : objective.num_placed].cpu(), 0.0)
        for part, weights in enumerate((counted * seen, 1.0 - seen)):
            right[part] += (hits * weights).sum()
            count[part] += weights.sum()
    of_context, of_masked = (right / count).tolist()
    overall = float(right.sum() / count.sum())
    return PositionAccuracy(mask_ratio, overall, of_context, of_masked, 1.0 / places)


def plot_accuracy(scores: Sequence[PositionAccuracy], *, name: str, trained_at: float) -> Figure:
    """Plot accuracy over η.

    Args:
        scores: in order of increasing η.
        trained_at: η in training.
    """
    figure, axes = plain_axes("mask ratio η at evaluation", "patches put in their place (%)")
    ratios = [score.mask_ratio for score in scores]
    for label, values, style in (
        ("all patches", [score.accuracy for score in scores], "o-"),
        ("context patches", [score.of_context for score in scores], ":"),
        ("masked patches", [score.of_masked for score in scores], "--"),
    ):
        axes.plot(ratios, [100 * value for value in values], style, color="#1f5fa8", label=label)
    axes.axhline(100 * scores[0].chance, color="#8a8a8a", label="chance")
    axes.axvline(trained_at, color="#c2571a", alpha=0.5, label="η in training")
    axes.set_ylim(bottom=0)
    axes.set_title(name, fontsize="medium")
    legend_below(figure, columns=3)
    return figure


def applies(objective: Trainable) -> bool:
    """Return True if the model predicts positions; raise UserError otherwise."""
    Places.of(objective)
    return True


def plot_positions(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Measure accuracy at mask ratios from 0 to 0.9, and plot it."""
    objective = Places.of(subject.objective)
    images = representative(subject.images, options.num_images)
    scores = [
        position_accuracy(
            subject.inference,
            objective,
            images,
            mask_ratio=number / 10,
            num_images=options.num_images,
        )
        for number in range(10)
    ]
    words = ", ".join(f"{score.mask_ratio:.1f}: {score.accuracy:.1%}" for score in scores[::2])
    return RenderedFigure(
        plot_accuracy(scores, name=subject.name, trained_at=objective.mask_ratio),
        [score.record() for score in scores],
        [f"accuracy by mask ratio (chance {scores[0].chance:.1%}): {words}"],
    )


def plot_jigsaw(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Shuffle the patches of held-out images and reassemble them; draw the first eight."""
    objective = Places.of(subject.objective)
    rows: list[Any] = []
    accuracies: list[list[float]] = []
    images = read_round_robin(subject.images, options.num_images).inputs
    for number, image in enumerate(images, options.seed):
        part, found = jigsaw_rows(subject.inference, objective, image, _RATIOS, seed=number)
        if len(accuracies) < _DRAWN:
            rows += [[image.cpu().numpy(), *row] for row in part]
        accuracies.append(found)
    means = [sum(column) / len(column) for column in zip(*accuracies, strict=True)]
    words = ", ".join(f"{r}: {mean:.1%}" for r, mean in zip(_RATIOS, means, strict=True))
    return RenderedFigure(image_grid(rows), lines=[f"accuracy by mask ratio: {words}"])


def plot_mixture(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Mix the patches of pairs of held-out images and reassemble them.

    Raises:
        UserError: there is a single image.
    """
    objective = Places.of(subject.objective)
    rows: list[Any] = []
    images = read_round_robin(subject.images, 2 * options.num_images).inputs
    if len(images) < 2:
        raise UserError(f"{subject.images.directory} has one image, and a mixture needs two")
    # A small folder may have an odd number of images; the last one then has no partner.
    pairs = images[: len(images) // 2 * 2].split(2)
    for number, pair in enumerate(pairs, options.seed):
        rows += mixture_rows(subject.inference, objective, pair, _RATIOS, seed=number)
    return RenderedFigure(image_grid(rows), lines=[f"{len(pairs)} pairs, mask ratios {_RATIOS}"])


def reassemble(patches: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Move each patch to its position, averaging patches at the same one.

    Args:
        patches: float `[b, n, d]`.
        places: positions int64 `[b, n]`.

    Returns:
        Patches `[b, n, d]` in raster order, zeros at empty positions, and the mask bool `[b, n]` of
        occupied positions.
    """
    index = places[..., None].expand_as(patches)
    sums = torch.zeros_like(patches).scatter_add_(1, index, patches)
    counts = torch.zeros_like(places).scatter_add_(1, places, torch.ones_like(places))
    return sums / counts.clamp(min=1)[..., None], counts > 0


def show(objective: Places, patches: Tensor, filled: Tensor | None = None) -> np.ndarray:
    """Return patches `[b, n, d]` as images uint8 `[b, h, w, 3]`, grey where `filled` is false."""
    images = objective.images_of(patches).cpu().numpy()
    if filled is None:
        return images
    return hide(images, pixels_of(filled, objective.reads.grid, images))


def outline(images: np.ndarray, chosen: Tensor) -> np.ndarray:
    """Outline the patches where `chosen`, bool `[b, n]`, is true, in uint8 `[b, h, w, 3]`."""
    side, rows = images.shape[1], round(chosen.shape[1] ** 0.5)
    patch = side // rows
    within = np.arange(side) % patch
    edge = (within == 0) | (within == patch - 1)
    lines = (edge[:, None] | edge[None, :]) & pixels_of(chosen, (rows, rows), images)
    return np.where(lines[..., None], np.array(_GREEN, np.uint8), images)


def jigsaw_rows(
    inference: Inference,
    objective: Places,
    image: Tensor,
    ratios: Iterable[float],
    *,
    seed: int = 0,
) -> tuple[list[list[np.ndarray]], list[float]]:
    """Shuffle the patches of one image and reassemble them from predicted positions.

    Args:
        image: uint8 `[h, w, 3]`.
        ratios: η of each column.
        seed: seed of context and shuffling.

    Returns:
        Three rows: context patches at their positions, the shuffled patches with the context in
        green, and patches at their predicted positions; and the accuracy of each column, without
        the patches whose position is given.
    """
    patches = objective.patches_of(image[None].to(inference.context.device))
    rows: list[list[np.ndarray]] = [[], [], []]
    accuracies = []
    order = _shuffled(patches.shape[1], seed)
    for ratio in ratios:
        context = objective.context_of(torch.tensor([seed], device=patches.device), ratio)
        seen = torch.zeros(1, patches.shape[1], dtype=torch.bool).scatter_(1, context.cpu(), True)
        places = predicted_places(inference, objective, patches, context)
        hits = (places.cpu() == torch.arange(len(order))).float()
        hits = hits.scatter(1, context[:, : objective.num_placed].cpu(), 0.0)
        accuracies.append(float(hits.sum()) / (len(order) - objective.num_placed))
        rows[0].append(show(objective, patches, seen)[0])
        shuffled = show(objective, gather_tokens(patches, order.to(patches.device)))
        rows[1].append(outline(shuffled, gather_tokens(seen, order))[0])
        rows[2].append(show(objective, *reassemble(patches, places))[0])
    return rows, accuracies


def mixture_rows(
    inference: Inference, objective: Places, pair: Tensor, ratios: Iterable[float], *, seed: int = 0
) -> list[list[np.ndarray]]:
    """Shuffle the patches of two images together and reassemble each half.

    Args:
        pair: uint8 `[2, h, w, 3]`.
        ratios: η of each row.
        seed: seed of context and shuffling.

    Returns:
        One row per η: both images, then for each half of the mixture its patches, context in green,
        and the patches at their predicted positions.
    """
    whole = objective.patches_of(pair.to(inference.context.device))
    count = whole.shape[1]
    mixed = whole.flatten(0, 1)[_shuffled(2 * count, seed).to(whole.device)].view(2, count, -1)
    rows = []
    for ratio in ratios:
        context = objective.context_of(torch.tensor([seed, seed + 1], device=whole.device), ratio)
        seen = torch.zeros(2, count, dtype=torch.bool).scatter_(1, context.cpu(), True)
        places = predicted_places(inference, objective, mixed, context)
        halves = outline(show(objective, mixed), seen)
        sorted_halves = show(objective, *reassemble(mixed, places))
        row = [*pair.cpu().numpy()]
        for half, put in zip(halves, sorted_halves, strict=True):
            row += [half, put]
        rows.append(row)
    return rows


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
