"""Image grids while a run trains: completions of held-out images, or samples from nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megavis.config.errors import UserError
from megavis.data.dataset import ShardDataset
from megavis.data.manifest import PALETTE_NAME
from megavis.model.runner import Runner
from megavis.objectives.base import Objective, TokenByToken
from megavis.sampling.grids import save_png
from megavis.sampling.pictures import picture_of_completions, picture_of_samples
from megavis.tokenizers.palette import Palette
from megavis.training.hooks import StepState


class SampleImages:
    """Draws a grid every N steps into `samples/` and TensorBoard."""

    def __init__(
        self,
        run_folder: Path,
        dataset: ShardDataset | None,
        *,
        objective: Objective,
        every: int,
        num_images: int,
    ) -> None:
        """Set up.

        Args:
            run_folder: holds the palette and takes the pictures.
            dataset: held-out images whose upper half is given; None draws from nothing.
            objective: the paper.
            every: steps between two grids.
            num_images: images of a grid.

        Raises:
            UserError: when this paper's models cannot be sampled so, before any work is done.
        """
        if not isinstance(objective, TokenByToken):
            raise UserError(
                f"training.sample_every: {objective.config.objective.name} is not generated id by"
                " id; set it to 0"
            )
        objective.inputs_at(torch.zeros(1, objective.num_tokens, dtype=torch.int64), 0, 1)
        self.folder, self.every, self.num_images = run_folder, every, num_images
        self.originals = None
        if dataset is not None:
            # Spread over the data set, which may lie in the order of its classes.
            places = np.linspace(0, len(dataset) - 1, num_images).astype(np.int64)
            self.originals = torch.from_numpy(dataset.read(places)[0].astype(np.int64))

    def __call__(self, state: StepState) -> None:
        """Draw where it is due, but not before the first step."""
        if state.loss is None or not state.is_due(self.every):
            return
        engine = state.engine
        runner = Runner(engine.layers, engine.context)
        palette = Palette.load(self.folder / PALETTE_NAME)
        if self.originals is None:
            pixels = picture_of_samples(
                runner, engine.objective, palette, num_images=self.num_images
            )
        else:
            pixels = picture_of_completions(
                runner,
                engine.objective,
                palette,
                originals=self.originals.to(engine.context.device),
                num_given=engine.objective.num_tokens // 2,
            )
        if engine.context.is_main:
            save_png(self.folder / "samples" / f"step-{state.step:08d}.png", pixels)
            state.images["samples"] = pixels
