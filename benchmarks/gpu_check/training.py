"""A training engine on random batches, for stages that time or compare steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.state.restore import load_training_state
from megavis.checkpoint.state.save import HostCopies, Snapshot, TrainingProgress, reserve_copies
from megavis.config.load import dump_config
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch
from megavis.model.kernels import choose_kernels
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext
from megavis.training.bench import random_batch
from megavis.training.engine import Engine


class Trainer:
    """Trains on random batches, which are a function of the step.

    Attributes:
        engine: megavis's engine.
        steps_taken: steps since the start of the run.
        copies: host memory of snapshots.
    """

    def __init__(self, config: RunConfig, context: ParallelContext, *, first_step: int = 0) -> None:
        """Build the engine and four alternating batches, in pinned memory for CUDA."""
        choose_kernels(config.training.kernels)
        self.objective = build_objective(config, context)
        self.engine = Engine(self.objective)
        self.steps_taken = first_step
        self.copies = HostCopies(keeps=context.device.type == "cuda")
        count = self.engine.micro_batch_size
        self._batches = [random_batch(self.objective, count, seed=seed) for seed in range(4)]
        if context.device.type == "cuda":
            self._batches = [batch.pin_memory() for batch in self._batches]

    def enqueue(self) -> torch.Tensor:
        """Take a step without synchronization; return the loss on the device."""
        loss = self.engine.train_step(self._stream(), self.steps_taken)
        self.steps_taken += 1
        return loss

    def step(self) -> float:
        """Take a step and wait for its loss."""
        return float(self.enqueue())

    def _stream(self) -> Iterator[Batch]:
        while True:
            yield self._batches[self.steps_taken % len(self._batches)]

    def prepare_snapshots(self) -> None:
        """Allocate host memory for snapshots, as training does after its first step, and wait."""
        reserve_copies(self.copies, self.engine.states)
        self.copies.wait()

    def snapshot(self, folder: Path) -> Snapshot:
        """Copy the state of the run to host memory, for a run folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        config, steps = self.engine.config, self.steps_taken
        progress = TrainingProgress(
            step=steps,
            samples_seen=steps * config.training.batch_size,
            seed=config.seed,
            tokenizer=None,
        )
        return Snapshot(folder, progress, self.engine.states, self.copies)

    def save(self, folder: Path) -> Path:
        """Write a run folder with a checkpoint; return the folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(self.engine.config))
        snapshot = self.snapshot(folder)
        snapshot.write()
        snapshot.publish()
        return folder

    def load(self, folder: Path) -> None:
        """Continue from the newest checkpoint of a run folder."""
        manifest = load_training_state(chosen_checkpoint(folder), self.engine.states)
        self.steps_taken = manifest.step
