"""Quality of predicted parts of images, and of a trivial baseline.

The lower part of an image is completed from the rows above; the baseline repeats the last row that
is given. The score is the peak signal-to-noise ratio of what was not given. By squared error the
best completion is the mean over all that are possible, which no drawn one is: even one drawn from
the true distribution has twice the squared error of the mean. So both are scored, a completion as
it is drawn, and the mean of several.

Legend: b images, n completions of each, h and w their height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.evaluation.figures import Row
from megavis.model.autoencoder_losses import PerceptualDistance


def repeat_last_row(images: Tensor, num_rows: int) -> Tensor:
    """Return images `[b, h, w, 3]` whose rows from `num_rows` on are the row before them."""
    last = images[:, num_rows - 1 : num_rows].expand(-1, images.shape[1] - num_rows, -1, -1)
    return torch.cat([images[:, :num_rows], last], dim=1)


def signal_to_noise(made: Tensor, true: Tensor) -> Tensor:
    """Return the PSNR of each image in dB: 10 log₁₀(255² / mean squared error), float64 `[b]`.

    Args:
        made: 0 to 255, `[b, ...]`.
        true: likewise, or a shape that is spread over it; an image that is equal gives infinity.
    """
    errors = (made.double() - true.double()).square().flatten(1).mean(1)
    return 10.0 * torch.log10(255.0**2 / errors)


@dataclass(frozen=True)
class Completions:
    """PSNR in dB, over all pixels of all images together, and of each image."""

    completed: float
    mean: float
    """Of the mean of an image's completions."""
    repeated: float
    rows: Sequence[Row]


def score_completions(originals: Tensor, completed: Tensor, given: Tensor) -> Completions:
    """Compare completions with originals, where nothing was given.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        completed: `[n, b, h, w, 3]`.
        given: bool `[b, h, w]`.

    Raises:
        UserError: what was given is not the first rows of every image.
    """
    height, num_rows = given.shape[1], int(given[0, :, 0].sum())
    rows = (torch.arange(height, device=given.device) < num_rows)[None, :, None]
    if not 0 < num_rows < height or not torch.equal(given, rows.expand_as(given)):
        raise UserError(
            "the run's order does not begin with whole rows, so there is no last row to repeat"
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


_BATCH_SIZE = 64


def score_filling(
    originals: Tensor, made: Tensor, hidden: Tensor, *, perceptual: PerceptualDistance | None = None
) -> dict[str, float]:
    """Compare images of which a part was predicted with what they were.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        made: likewise; what was given is as it was.
        hidden: bool `[b, h, w]`, the pixels that were predicted.
        perceptual: the distance to measure besides.

    Returns:
        `psnr`: dB, of the hidden pixels of all images together; `psnr_of_images`: of all pixels of
        each image, the mean over the images; `lpips_alexnet` or as the distance is named: its mean.
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
