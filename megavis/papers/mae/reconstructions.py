"""Figure of hidden tokens predicted from the visible ones, for any model that hides tokens.

Legend: b images, n tokens, h and w height and width in pixels; all colours are uint8.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megavis.composition.model import Model, model_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch, read_round_robin
from megavis.evaluation.figures import FigureInput, RenderedFigure
from megavis.evaluation.images.pair_metrics import score_filling
from megavis.evaluation.images.results import FilledHidden, FillingScores
from megavis.model.inference import Inference
from megavis.sampling.pictures import hide, image_grid, pixels_of


@dataclass(frozen=True)
class Reconstructions:
    """Images and a model's predictions of them.

    Attributes:
        originals: uint8 `[b, h, w, 3]`.
        made: uint8 `[b, h, w, 3]`, with hidden tokens replaced by their predictions.
        flat: uint8 `[b, h, w, 3]`, with hidden tokens replaced by their mean colours.
        hidden: bool `[b, n]` in raster order, true where a token was predicted.
    """

    originals: Tensor
    made: Tensor
    flat: Tensor
    hidden: Tensor


def reconstruct(inference: Inference, model: Model, batch: Batch, folder: Path) -> Reconstructions:
    """Hide tokens as in training, and predict them.

    Args:
        inference: the model, on one process.
        batch: images, whose sample indices determine the mask.
        folder: the run folder, which may contain a palette.

    Raises:
        UserError: see `applies`.
    """
    applies(model)
    arrangement = model.schedule.draw(batch.sample_index)
    count = arrangement.num_positions - arrangement.first_asked  # Without idle rows.
    predicted = arrangement.is_predicted[:, :count].expand(len(batch.inputs), -1)
    sequence = model.sequence(batch)
    predictions = inference.predictions(sequence.inputs)
    restored = model.density.restored(predictions, sequence.targets[0])[:, :count]
    samples = model.condition.predicted(batch.inputs)
    tokens = model.predicts.sequence(model.predicts.of(samples, batch.sample_index))
    places = arrangement.order[:, arrangement.first_asked :].expand(len(tokens), -1)
    hidden = torch.zeros_like(tokens[..., 0], dtype=torch.bool).scatter(1, places, predicted)
    made = tokens.scatter(1, places[..., None].expand_as(restored), restored)
    made = torch.where(hidden[..., None], made, tokens)
    originals, made = (
        model.predicts.to_images(model.predicts.from_sequence(each), folder)
        for each in (tokens, made)
    )
    return Reconstructions(
        originals, made, _flattened(originals, hidden, model.predicts.grid), hidden
    )


def _flattened(images: Tensor, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
    """Replace each hidden cell of a grid by its mean colour."""
    rows, columns = grid
    count, height, width, _ = images.shape
    cells = images.view(count, rows, height // rows, columns, width // columns, 3)
    means = cells.float().mean((2, 4), keepdim=True).round().to(torch.uint8)
    flat = torch.where(hidden.view(count, rows, 1, columns, 1, 1), means, cells)
    return flat.reshape(images.shape)


def applies(objective: Trainable) -> bool:
    """Return True if the model predicts some tokens from visible ones.

    Raises:
        UserError: it predicts no tokens, or all of them, or transforms them first.
    """
    model = model_of(objective)
    if model.has_transform:
        raise UserError(
            f"with {model.paper.key('transform')} every token depends on the whole image, so the"
            " visible ones reveal the hidden ones"
        )
    arrangement = model.schedule.draw(torch.zeros(1, dtype=torch.int64))
    if arrangement.first_asked == 0 and bool(arrangement.is_predicted.all()):
        name = model.config.objective.name
        raise UserError(f"runs of {name} predict every token, so no token is visible")
    if not model.density.predicts_tokens:
        raise UserError("the predictions of this model cannot be shown as images")
    return True


def plot_reconstructions(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Predict hidden tokens, compute their PSNR, and draw the first eight images."""
    batch = read_round_robin(subject.images, options.num_images).to(
        subject.inference.context.device
    )
    model = model_of(subject.objective)
    found = reconstruct(subject.inference, model, batch, subject.folder)
    originals, made = (each.cpu().numpy() for each in (found.originals, found.made))
    hidden = pixels_of(found.hidden, model.predicts.grid, originals)
    is_hidden = torch.from_numpy(hidden)
    rows = [
        FilledHidden(name, FillingScores(**score_filling(found.originals, images, is_hidden)))
        for name, images in (("predicted", found.made), ("mean colours", found.flat))
    ]
    words = ", ".join(f"{row.hidden} {row.scores.psnr:.2f} dB" for row in rows)
    columns = (hide(originals, ~hidden), made, originals)
    return RenderedFigure(
        image_grid([*zip(*columns, strict=True)][:8]),
        [row.record() for row in rows],
        [f"PSNR of the hidden patches of {len(batch)} images: {words}"],
    )
