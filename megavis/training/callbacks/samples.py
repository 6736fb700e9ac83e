"""Sample image grids during training, unconditionally or from held-out images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.loader import Readable, read_batch
from megavis.model.inference import Inference
from megavis.sampling.pictures import Gallery, save_png
from megavis.training.callbacks.callback import StepState


class SampleImages:
    """Writes a grid every N steps to `samples/` and TensorBoard.

    `dataset` has held-out images to start from; None for unconditional samples. Raises UserError if
    the objective does not support such samples.
    """

    def __init__(
        self,
        run_folder: Path,
        dataset: Readable | None,
        *,
        objective: Trainable,
        every: int,
        num_images: int,
    ) -> None:
        try:
            self.gallery = Gallery(objective, run_folder)
        except UserError as error:
            raise UserError(f"training.sample_every: {error}; set it to 0") from None
        self.folder, self.every, self.num_images = run_folder, every, num_images
        self.examples = None
        if dataset is not None:
            # Spread over the data set, which may be sorted by class.
            places = np.linspace(0, len(dataset) - 1, num_images).astype(np.int64)
            self.examples = read_batch(dataset, places, places)

    def __call__(self, state: StepState) -> None:
        """Sample if due, but neither before the first step nor when training stops.

        A grid that cannot be written, as on a full disk, is reported and training continues.
        """
        if state.loss is None or state.stop is not None or not state.is_due(self.every):
            return
        engine = state.engine
        runner = Inference(engine.layers, engine.context)
        examples = self.examples and self.examples.to(engine.context.device)
        with engine.evaluated():
            pixels = self.gallery.draw(runner, examples, num_images=self.num_images)
        if engine.context.is_main:
            state.images["samples"] = pixels
            try:
                save_png(self.folder / "samples" / f"step-{state.step:08d}.png", pixels)
            except OSError as error:
                text = f"WARNING: image grid of step {state.step} not written: {error}"
                tqdm.write(f"{text}; training continues", file=sys.stderr)
