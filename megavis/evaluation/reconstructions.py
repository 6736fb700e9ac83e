"""Hidden tokens of images as a model predicts them from the others.

Whose figure this is: docs/evaluation.md.

Legend: b images, n tokens, q predicted ones, h and w pixels; all colours uint8 in 0..255.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megavis.composition.composition import Composition
from megavis.config.errors import UserError
from megavis.data.loading.batch import Batch
from megavis.model.inference import Inference


@dataclass(frozen=True)
class Reconstructions:
    """Images and what a model makes of them.

    Attributes:
        originals: uint8 `[b, h, w, 3]`.
        made: likewise; visible tokens are as they were.
        flat: likewise; each hidden token has its own mean colour.
        hidden: bool `[b, n]`, the tokens that were predicted, in raster order.
    """

    originals: Tensor
    made: Tensor
    flat: Tensor
    hidden: Tensor


def reconstruct(
    runner: Inference, paper: Composition, batch: Batch, folder: Path
) -> Reconstructions:
    """Predict what training would hide of images, from what it would show.

    Args:
        runner: the model, on one process.
        paper: what it was trained for.
        batch: images; their numbers decide what is hidden, as in training.
        folder: of the run, which may hold what decodes tokens.

    Raises:
        UserError: the model does not predict tokens from others, or all of them.
    """
    plan = paper.schedule.draw(batch.sample_index)
    predicted = plan.is_predicted.expand(len(batch.inputs), -1)
    if plan.first_asked == 0 and bool(predicted.all()):
        name = paper.config.objective.name
        raise UserError(f"runs of {name} predict every token: none is visible among hidden ones")
    sequence = paper.sequence(batch)
    predictions = runner.predictions(sequence.inputs)
    restored = paper.density.restored(predictions, sequence.targets[0])
    tokens = paper.predicts.sequence(paper.predicts.of(batch.inputs, batch.sample_index))
    places = plan.order[:, plan.first_asked :].expand(len(tokens), -1)
    hidden = torch.zeros_like(tokens[..., 0], dtype=torch.bool).scatter(1, places, predicted)
    made = tokens.scatter(1, places[..., None].expand_as(restored), restored)
    made = torch.where(hidden[..., None], made, tokens)
    originals, made = (
        paper.predicts.to_images(paper.predicts.from_sequence(each), folder)
        for each in (tokens, made)
    )
    return Reconstructions(
        originals, made, _flattened(originals, hidden, paper.predicts.grid), hidden
    )


def _flattened(images: Tensor, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
    """Give each hidden cell of a grid its mean colour."""
    rows, columns = grid
    count, height, width, _ = images.shape
    cells = images.view(count, rows, height // rows, columns, width // columns, 3)
    means = cells.float().mean((2, 4), keepdim=True).round().to(torch.uint8)
    flat = torch.where(hidden.view(count, rows, 1, columns, 1, 1), means, cells)
    return flat.reshape(images.shape)
