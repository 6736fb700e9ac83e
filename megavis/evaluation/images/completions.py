"""Quality of predicted parts of images, compared with a trivial baseline.

The lower part of an image is completed from the rows above; the baseline repeats the last given
row. The score is the peak signal-to-noise ratio of the completed part. The completion with the
least squared error is the mean over all possible ones: even a sample from the true distribution has
twice its squared error. So both single completions and the mean of several are scored.

Legend: b images, n completions per image, h and w their height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.evaluation.figures import Row
from megavis.model.autoencoder_losses import PerceptualDistance

_BATCH_SIZE = 64


def repeat_last_row(images: Tensor, num_rows: int) -> Tensor:
    """Replace the rows of images `[b, h, w, 3]` from `num_rows` on by the row before them."""
    last = images[:, num_rows - 1 : num_rows].expand(-1, images.shape[1] - num_rows, -1, -1)
    return torch.cat([images[:, :num_rows], last], dim=1)


def signal_to_noise(made: Tensor, true: Tensor) -> Tensor:
    """Return the PSNR of each image in dB: 10 log₁₀(255² / mean squared error), float64 `[b]`.

    Args:
        made: 0 to 255, `[b, ...]`.
        true: likewise, or broadcastable to it; equal images give infinity.
    """
    errors = (made.double() - true.double()).square().flatten(1).mean(1)
    return 10.0 * torch.log10(255.0**2 / errors)


@dataclass(frozen=True)
class Completions:
    """PSNR in dB, over all pixels of all images and per image."""

    completed: float
    mean: float
    """PSNR of the mean of an image's completions."""
    repeated: float
    rows: Sequence[Row]


def score_completions(originals: Tensor, completed: Tensor, given: Tensor) -> Completions:
    """Compare completions with originals outside the given part.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        completed: `[n, b, h, w, 3]`.
        given: bool `[b, h, w]`.

    Raises:
        UserError: the given part is not the first rows of every image.
    """
    height, num_rows = given.shape[1], int(given[0, :, 0].sum())
    rows = (torch.arange(height, device=given.device) < num_rows)[None, :, None]
    if not 0 < num_rows < height or not torch.equal(given, rows.expand_as(given)):
        raise UserError(
            "the run's order does not start with whole rows, so there is no last row to repeat"
        )
    true = originals[:, num_rows:]
    drawn = completed[:, :, num_rows:].transpose(0, 1)
    made = {
        "completed": drawn,
        "mean_of_completions": drawn.double().mean(1, keepdim=True),
        "last_row_repeated": repeat_last_row(originals, num_rows)[:, None, num_rows:],
    }
    scores = {name: signal_to_noise(part, true[:, None]).tolist() for name, part in made.items()}
    completed_db, mean_db, repeated_db = (
        float(signal_to_noise(part[None], true[None, :, None])) for part in made.values()
    )
    table = [
        {"image": i, **{f"psnr_{name}": score[i] for name, score in scores.items()}}
        for i in range(len(originals))
    ]
    return Completions(completed_db, mean_db, repeated_db, table)


def score_filling(
    originals: Tensor, made: Tensor, hidden: Tensor, *, perceptual: PerceptualDistance | None = None
) -> dict[str, float]:
    """Compare images with a predicted part to the originals.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        made: uint8 `[b, h, w, 3]`, equal to the originals outside the hidden pixels.
        hidden: bool `[b, h, w]`, the predicted pixels.
        perceptual: a perceptual distance to measure too.

    Returns:
        `psnr`: in dB, over the hidden pixels of all images; `psnr_of_images`: the mean over images
        of the PSNR over all pixels; and the mean of the distance by its name, `lpips_alexnet`.
    """
    scores = {
        "psnr": float(signal_to_noise(made[hidden][None], originals[hidden][None])),
        "psnr_of_images": float(signal_to_noise(made, originals).mean()),
    }
    if perceptual is not None:
        pairs = zip(made.split(_BATCH_SIZE), originals.split(_BATCH_SIZE), strict=True)
        distances = torch.cat([perceptual(_pixels(a), _pixels(b)) for a, b in pairs])
        scores[perceptual.name] = float(distances.mean())
    return scores


def _pixels(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 255.0
