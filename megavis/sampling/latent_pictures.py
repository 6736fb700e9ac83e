"""Pictures of GIVT's models: latents drawn, decoded by the VAE and put into a grid.

Legend: b images, c channels and h, w of the latents, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.model.runner import Runner
from megavis.objectives.real_tokens import ReadsImages
from megavis.sampling.batches import share_out
from megavis.sampling.grids import image_grid, sample_grid
from megavis.sampling.latents import LatentSampler


@dataclass(frozen=True)
class LatentPictures:
    """Draws images of classes.

    Attributes:
        sampler: draws latents, which its objective's VAE decodes.
    """

    sampler: LatentSampler

    def draw(self, labels: Tensor, images: Tensor, *, later: Tensor | None = None) -> Tensor:
        """Draw images uint8 `[b, H, W, 3]`.

        Args:
            labels: int64 `[b]`, classes; -1: none.
            images: int64 `[b]`, numbers of the images, which with the seed decide every draw.
            later: classes of the second half (figure 19); the same when None.
        """
        if later is None:
            return self.sampler.objective.decode(self.sampler.draw(labels, images))
        return self.sampler.objective.decode(self.sampler.change_of_label(labels, later, images))

    def shared(
        self, labels: Tensor, *, later: Tensor | None = None, batch_size: int = 64
    ) -> np.ndarray:
        """Draw images of `labels` `[b]`, shared out over the data-parallel processes.

        Every process of the job calls this together and gets all: uint8 `[b, H, W, 3]`.
        """

        def draw(numbers: Tensor) -> Tensor:
            places = numbers % len(labels)
            return self.draw(
                labels[places], numbers, later=None if later is None else later[places]
            )

        data = self.sampler.runner.context.data
        return share_out(draw, len(labels), batch_size=batch_size, data=data).cpu().numpy()

    def predictions(
        self, examples: Batch, *, num_drawn: int = 3, batch_size: int = 64
    ) -> np.ndarray:
        """Return a grid of what a model with an encoder makes of images, a row an image.

        Every process of the job calls this together.

        Args:
            examples: what shards hold.
            num_drawn: targets of each image, each with draws of its own.
            batch_size: drawn at once.

        Returns:
            uint8 `[H, W, 3]`: image | target | drawn targets.
        """
        sampler, objective = self.sampler, self.sampler.objective
        assert isinstance(objective, ReadsImages)
        images, targets = objective.images_and_targets(examples.inputs)

        def draw(numbers: Tensor) -> Tensor:
            places = (numbers % len(images)).to(images.device)
            latents = sampler.draw(examples.labels[places], numbers, seen=images[places])
            return objective.decode(latents)

        count, data = len(images) * num_drawn, sampler.runner.context.data
        drawn = share_out(draw, count, batch_size=batch_size, data=data)
        columns = [images, targets, *drawn.split(len(images))]
        return image_grid([list(row) for row in zip(*map(_pixels, columns), strict=True)])

    def rounds(self, labels: Tensor) -> np.ndarray:
        """Return a grid of figure 15: a row an image, a draw from the prior, then the rounds."""
        images = torch.arange(len(labels))
        latents = [self.sampler.prior(images), *self.sampler.rounds(labels, images)]
        columns = [self.sampler.objective.decode(one).cpu().numpy() for one in latents]
        return sample_grid(
            np.stack(columns, 1).reshape(-1, *columns[0].shape[1:]), num_columns=len(columns)
        )


def spread_classes(num_classes: int, num_images: int) -> Tensor:
    """Return int64 `[num_images]`: classes evenly spread, equals together; -1 where none are."""
    if not num_classes:
        return torch.full((num_images,), -1)
    return torch.arange(num_images) * num_classes // num_images


def _pixels(images: Tensor) -> np.ndarray:
    return images.cpu().numpy()


class LatentGallery:
    """Samples by class, while a run trains."""

    def __init__(self, objective: Any, run_folder: Path) -> None:
        # Refuses a config without a VAE now, not after hours.
        objective.decode(torch.zeros(1, *objective.latent_shape))
        self.objective = objective

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        pictures = LatentPictures(LatentSampler(runner, self.objective))
        return sample_grid(pictures.shared(spread_classes(self.objective.num_classes, num_images)))


class PredictionGallery(LatentGallery):
    """What belongs to held-out images, drawn while a run trains."""

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        if examples is None:
            raise UserError("predictions from images need images: give data.validation")
        return LatentPictures(LatentSampler(runner, self.objective)).predictions(examples)
