"""Mean loss on held-out images during training, and grids of generated images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.loader import Readable, evaluation_batches, read_batch
from megavis.model.inference import Inference
from megavis.sampling.pictures import Gallery, save_png
from megavis.training.callbacks.callback import Callback, StepState
from megavis.training.engine import Engine
from megavis.training.metrics import MetricsWriter, read_metrics

_COUNT = "images"


class Validate:
    """Mean loss on held-out images, every N steps and before the first.

    `is_urgent` is called before each batch, on all processes, to decide whether to abort.
    """

    def __init__(
        self,
        dataset: Readable,
        every: int,
        num_images: int,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dataset, self.every, self.num_images = dataset, every, num_images
        self.is_urgent = is_urgent

    def __call__(self, state: StepState) -> None:
        """Record `validation_loss` if due."""
        if state.is_due(self.every):
            with state.engine.evaluated():
                # Before the first step there is nothing to save, so no need to hurry.
                measured = self.measure(state.engine, may_break_off=state.step > 0)
            state.record.update({f"validation_{name}": v for name, v in measured.items()})

    def catch_up(
        self,
        state: StepState,
        callbacks: Sequence[Callback],
        metrics: MetricsWriter | None,
        run_folder: Path,
    ) -> None:
        """Repeat the validation that a signal aborted just before the run was saved.

        The metrics then equal those of an uninterrupted run. Collective over all processes, with
        the state that was saved. `callbacks` follow the validation, as without interruption; the
        metrics in the run folder show whether it was done.
        """
        if not state.is_due(self.every):
            return
        lines = read_metrics(run_folder)
        is_done = any("validation_loss" in line and line["step"] == state.step for line in lines)
        # The folder may appear older on another node.
        if state.engine.context.from_main(is_done):
            return
        for callback in (self, *callbacks):
            callback(state)
        if metrics is not None and state.record:
            metrics.amend(state.step, state.record)

    def measure(self, engine: Engine, *, may_break_off: bool) -> dict[str, float]:
        """Return the mean loss over the held-out images, and the objective's other metrics.

        Called on every process. The result is empty if aborted.
        """
        runner = Inference(engine.layers, engine.context)
        batches = evaluation_batches(
            self.dataset,
            batch_size=engine.micro_batch_size,
            data_parallel_rank=engine.context.data.rank,
            data_parallel_size=engine.context.data.size,
            limit=self.num_images,
            label=None,
        )
        sums: dict[str, Tensor] = {}
        for batch in batches:
            if may_break_off and self.is_urgent():
                return {}
            sequence = engine.objective.sequence(batch.to(engine.context.device))
            predictions = runner.predictions(sequence.inputs)
            with torch.no_grad():
                loss = engine.objective.loss(predictions, sequence.targets)
                measured = engine.objective.measures(predictions, sequence.targets)
            one = torch.ones((), device=loss.device)
            for name, value in {"loss": loss, **measured, _COUNT: one}.items():
                sums[name] = sums.get(name, 0.0) + value.double() * len(batch)
        total = torch.stack(list(sums.values()))
        torch.distributed.all_reduce(total, group=engine.context.data.group)
        means = dict(zip(sums, (total / total[-1]).tolist(), strict=True))
        return {name: mean for name, mean in means.items() if name != _COUNT}


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
