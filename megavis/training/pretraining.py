"""The pre-training side of a run: an encoder from another run, and early stopping by accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from megavis.checkpoint.format.folder import early_stopping_file, saved_steps
from megavis.checkpoint.state.restore import start_encoder
from megavis.composition.trainable import StartingWeights, Trainable
from megavis.config.errors import UserError, blame
from megavis.config.schema import RunConfig
from megavis.data.loading.dataset import ShardDataset, Subset, representative
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.validation import EarlyStopping
from megavis.training.engine import Engine


@dataclass
class Pretraining:
    """The part of a run that differs from fine-tuning (`Finetuning`).

    Attributes:
        validation: held-out images, if any.
        encoder: where the weights of an encoder come from, if it starts from another run.
        stopping: early stopping, if `training.patience` is set.
    """

    config: RunConfig
    validation: ShardDataset | Subset | None
    encoder: StartingWeights | None
    stopping: EarlyStopping | None

    @classmethod
    def open(cls, objective: Trainable, validation: ShardDataset | None) -> Pretraining:
        """Open the run that an encoder starts from, if any.

        Raises:
            UserError: it does not fit, or early stopping needs an accuracy that is not measured.
        """
        config, encoder = objective.config, None
        patience = config.training.patience
        if objective.pretrained_key is not None:
            with blame(objective.pretrained_key):
                encoder = objective.pretrained()
        if patience and not objective.measures_accuracy:
            text = f"{config.objective.name} measures no accuracy in pre-training; set it to 0"
            raise UserError(text, key="training.patience")
        images: ShardDataset | Subset | None = None
        if validation is not None:
            count, is_main = config.training.validation_images, objective.context.is_main
            images = representative(validation, count, announces=is_main)
        return cls(config, images, encoder, EarlyStopping(patience) if patience else None)

    def resume(self, step: int, context: ParallelContext) -> None:
        """Restore the state after `step` steps; if training continues, remove the best step."""
        folder = self.config.folder
        if self.stopping is not None:
            self.stopping = EarlyStopping.resume(self.stopping.patience, folder, step, context)
        is_over = self.stopping is not None and self.stopping.is_over
        # Without patience now, too: the step is no longer kept.
        if step < self.config.training.steps and not is_over:
            context.on_main(lambda: early_stopping_file(folder).unlink(missing_ok=True))

    def check_results(self) -> None:
        """Accept any earlier results, which training replaces."""

    def start(self, engine: Engine) -> None:
        """Load the encoder's weights, if another run has them."""
        if self.encoder is not None:
            start_encoder(self.encoder, engine.states)

    def finish(self, engine: Engine) -> None:
        """Record the best step, with early stopping."""
        folder = self.config.folder
        if self.stopping is not None and engine.context.is_main:
            self.stopping.record(early_stopping_file(folder), saved_steps(folder))
