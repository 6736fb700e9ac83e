"""The picture that shows how a run is doing, whatever its paper.

What an objective can do is a protocol (`TokenByToken`, ...); for each protocol one class here, or
in a file of its own, turns a model and some held-out images into a grid. `megavis train` draws it
every `training.sample_every` steps, `megavis sample` on demand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import PALETTE_NAME
from megavis.model.runner import Runner
from megavis.objectives.base import PatchByPatch, TokenByToken
from megavis.objectives.real_tokens import OneByOne, ReadsImages, Uncovers
from megavis.objectives.trainable import Reconstructs, Trainable
from megavis.sampling.groupwise import GroupByGroup
from megavis.sampling.latent_pictures import LatentGallery, PredictionGallery
from megavis.sampling.pictures import (
    picture_of_completions,
    picture_of_fillings,
    picture_of_patches,
    picture_of_reconstructions,
    picture_of_samples,
)
from megavis.tokenizers.palette import Palette


class Gallery(Protocol):
    """Draws one kind of picture; built before the run starts, so it refuses what cannot be."""

    def __init__(self, objective: Any, run_folder: Path) -> None:
        """Set up; raises UserError when this config's models cannot be drawn so."""

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """Return a grid uint8 `[H, W, 3]`; every process of the job calls this together.

        Args:
            runner: the model.
            examples: held-out images to start from, on the runner's device; None where there are
                none, and images are drawn from nothing.
            num_images: how many.

        Raises:
            UserError: when this picture needs held-out images and has none.
        """


class TokenGallery:
    """Images id by id: samples from nothing, or completions of upper halves."""

    def __init__(self, objective: TokenByToken, run_folder: Path) -> None:
        objective.check_generation()
        self.objective: Any = objective
        self.folder = run_folder

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        palette = Palette.load(self.folder / PALETTE_NAME)
        if examples is None:
            return picture_of_samples(runner, self.objective, palette, num_images=num_images)
        return picture_of_completions(
            runner,
            self.objective,
            palette,
            originals=examples.inputs,
            num_given=self.objective.num_tokens // 2,
        )


class PatchGallery:
    """Images patch by patch: samples from nothing, or completions of first halves."""

    def __init__(self, objective: PatchByPatch, run_folder: Path) -> None:
        objective.check_drawing()
        self.objective = objective

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        return picture_of_patches(
            runner,
            self.objective,
            originals=None if examples is None else examples.inputs,
            num_images=num_images,
            num_given=0 if examples is None else self.objective.num_tokens // 2,
            num_completions=3,
        )


class FillingGallery:
    """Hidden patches filled in: all at once, and group by group."""

    def __init__(self, objective: GroupByGroup, run_folder: Path) -> None:
        objective.check_filling()
        self.objective = objective

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        if examples is None:
            raise UserError("patches to fill in need images: give data.validation")
        hidden = self.objective.num_tokens * 3 // 4
        counts = sorted({1, min(4, hidden), min(12, hidden)})
        return picture_of_fillings(
            runner, self.objective, originals=examples.inputs, counts=counts, share_given=0.25
        )


class ReconstructionGallery:
    """A tokenizer in training: images above what comes out."""

    def __init__(self, objective: Reconstructs, run_folder: Path) -> None:
        self.objective = objective

    def draw(self, runner: Runner, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """See `Gallery.draw`."""
        if examples is None:
            raise UserError("reconstructions need images: give data.validation")
        return picture_of_reconstructions(runner, self.objective, examples.inputs)


GALLERIES: list[tuple[type, type[Gallery]]] = [
    (TokenByToken, TokenGallery),
    (PatchByPatch, PatchGallery),
    (GroupByGroup, FillingGallery),
    (Reconstructs, ReconstructionGallery),
    (ReadsImages, PredictionGallery),
    (OneByOne, LatentGallery),
    (Uncovers, LatentGallery),
]
"""Which class draws for which protocol; the first that fits."""


def gallery_of(objective: Trainable, run_folder: Path) -> Gallery:
    """Return what draws this objective's picture.

    Raises:
        UserError: when nothing does.
    """
    for protocol, gallery in GALLERIES:
        if isinstance(objective, protocol):
            return gallery(objective, run_folder)
    raise UserError(f"{objective.config.objective.name} has no picture to draw")
