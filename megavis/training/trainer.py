"""Train a run, from its config to the last step.

The trainer opens data and checkpoints and connects engine, loop and callbacks, none of which
depends on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megavis.checkpoint.format.folder import prune, saved_steps
from megavis.checkpoint.format.manifest import CheckpointManifest, LossHistory
from megavis.checkpoint.state.restore import (
    Found,
    load_training_state,
    newest_intact_checkpoint,
)
from megavis.checkpoint.state.save import HostCopies, Snapshot, TrainingProgress, reserve_copies
from megavis.composition.finetuned import finetuned_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UnfinishedError, blame, permissions_needed, start_needs
from megavis.config.schema import RunConfig
from megavis.config.yaml_tree import leaves
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import BatchLoader
from megavis.data.loading.opening import ShardOpener
from megavis.grammar.same_run import words_of
from megavis.model.kernels import compiles_blocks
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext
from megavis.parallel.launch import Launch
from megavis.tokenizers.palette import Palette
from megavis.training.callbacks.callback import (
    Callback,
    LogMetrics,
    ReportReplacedSamples,
    SaveCheckpoint,
    ShowProgress,
    StepState,
    WatchHardware,
    collect_garbage,
)
from megavis.training.callbacks.compilation import ReportCompilation
from megavis.training.callbacks.validation import (
    SampleImages,
    Validate,
    evaluate_during,
)
from megavis.training.engine import Engine
from megavis.training.faults.bad_steps import (
    BadStepStreak,
    WatchBadSteps,
    record_rollback,
    roll_back,
)
from megavis.training.faults.corruption_check import CheckReplicas
from megavis.training.faults.interruption import (
    Signals,
    StopOnSignal,
    count_restart,
    forgiving_messages,
)
from megavis.training.faults.watchdog import Watchdog
from megavis.training.job import open_job
from megavis.training.loop import train
from megavis.training.metrics import MetricsWriter, check_dashboards
from megavis.training.pretraining import Pretraining
from megavis.training.run_folder import (
    check_earlier_run,
    check_same_origin,
    hold_run,
    prepare_folder,
)

if TYPE_CHECKING:
    from megavis.training.finetune import Finetuning


@dataclass
class Trainer:
    """The opened and checked parts of a run, and its training."""

    config: RunConfig
    context: ParallelContext
    objective: Trainable
    train_data: Samples
    tokenizer: str | None
    """SHA-256 of the tokenizer of the shards, or of the images."""
    task: Pretraining | Finetuning
    """The part that differs between pre-training and fine-tuning: initial weights, stopping, and
    the work after training."""
    copies: HostCopies = field(init=False)
    """Host memory of the run's snapshots."""

    def __post_init__(self) -> None:
        """Keep the host memory of snapshots if a save waits for copies into it."""
        self.copies = HostCopies(keeps=self.context.device.type == "cuda")

    @classmethod
    def open(cls, config: RunConfig, context: ParallelContext) -> Trainer:
        """Open the data and check it against the config.

        Raises:
            UserError: data and config do not match; names the key.
        """
        objective = build_objective(config, context)
        with blame("data.palette"):
            palette = Palette.load(config.data.palette) if config.data.palette else None
        needs_labels = objective.backbone.needs_labels
        opener = ShardOpener(
            config, palette, objective.check_data, needs_labels, objective.classes_of
        )
        train_data = opener.training_data()
        held_out, path = None, config.data.validation
        if path is not None:
            held_out = opener.held_out("data.validation", path, train_data)
        # Reject an unsuitable tokenizer now rather than at the first batch.
        tokenizer = train_data.manifest.identity or objective.backbone.tokenizer_identity
        task: Pretraining | Finetuning
        if (finetuned := finetuned_of(objective)) is None:
            task = Pretraining.open(objective, held_out)
        else:
            # Imported here, since it imports evaluation and figures.
            from megavis.training.finetune import Finetuning

            assert held_out is not None, "required by the config's checks"
            task = Finetuning.open(finetuned, train_data, held_out, opener)
        return cls(config, context, objective, train_data, tokenizer, task)

    def train(self, signals: Signals, extra_callbacks: Sequence[Callback] = ()) -> None:
        """Train to the last step, from the newest checkpoint if there is one; inside `hold_run`.

        Args:
            signals: records signals to this process.
            extra_callbacks: in addition to the standard ones.

        Raises:
            UnfinishedError: a signal stopped this or another process; the run is saved.
            BadStepsError: bad steps without a permitted rollback.
        """
        config, context = self.config, self.context
        with start_needs(config.folder):
            check_earlier_run(config)
            context.on_main(self.task.check_results)
            found = newest_intact_checkpoint(config.folder, context)
            if found is not None:
                check_same_origin(config, found[1], self.train_data, self.tokenizer)
            first_step = found[1].step if found else 0
            context.on_main(
                lambda: prepare_folder(config, self.objective, self.train_data, first_step, context)
            )
            count_restart(config.folder, first_step, config.training.max_restarts, context)
        interruption = StopOnSignal(signals)
        engine = Engine(self.objective)
        # The engine survives a rollback: its process groups and compiled blocks stay, and loading a
        # checkpoint replaces everything that training has changed.
        while streak := self._train_from(found, engine, interruption, extra_callbacks):
            found = roll_back(config.folder, streak, config.training, context)
        if interruption.has_stopped:
            raise UnfinishedError(f"{config.folder} is saved; start it again to resume")
        self.task.finish(engine)

    def _train_from(
        self,
        found: Found | None,
        engine: Engine,
        interruption: StopOnSignal,
        extra_callbacks: Sequence[Callback],
    ) -> BadStepStreak | None:
        """Train from a checkpoint or from scratch; return the bad steps that require a rollback."""
        config, context, start = self.config, self.context, found[1] if found else None
        first_step = start.step if start else 0
        with permissions_needed():
            self._restore(found, engine)
        # Some of these create process groups, so all processes build them in the same order.
        bad_steps = WatchBadSteps(
            config.training,
            config.checkpoint,
            history=start.losses if start else LossHistory(),
            batches_skipped=start.batches_skipped if start else 0,
        )
        save = SaveCheckpoint(
            config.checkpoint,
            functools.partial(self._snapshot, bad_steps=bad_steps, start=start),
            published=self._prune,
            prepare=lambda: reserve_copies(self.copies, engine.states),
        )
        validate = self._validate(interruption)
        extra = [*extra_callbacks, bad_steps, *self._checks(bad_steps)]
        log = LogMetrics(self.objective, stalled=lambda: save.stalled)
        callbacks = self._callbacks(first_step, validate, interruption, log, save, extra)

        def finish(state: StepState) -> None:
            save(state)
            log.restart_clock(state)

        with permissions_needed():
            metrics = self._open_metrics(first_step, start)
        if validate is not None and first_step:
            state = StepState(first_step, config.training.steps, None, engine)
            validate.catch_up(state, self._stopping, metrics, config.folder)
        # A restarted run may have stopped early before.
        is_over = self.task.stopping is not None and self.task.stopping.is_over
        # A rollback repeats steps but not their data, so the batch index runs ahead of the step.
        loader = self.loader(engine, first_step + bad_steps.batches_skipped)
        patience, stacks = config.training.hang_timeout, config.folder / "stacks"
        watchdog = Watchdog(context, patience=patience, stacks=stacks)
        # Show a failed run's last metrics too.
        written = contextlib.closing(metrics) if metrics is not None else contextlib.nullcontext()
        with loader, watchdog, written:
            train(
                engine,
                loader,
                first_step=first_step,
                last_step=first_step if is_over else config.training.steps,
                callbacks=callbacks,
                metrics=metrics,
                finish=finish,
                watchdog=watchdog,
            )
        return bad_steps.streak

    def _restore(self, found: Found | None, engine: Engine) -> None:
        """Load a checkpoint, or else the weights of another run that this one starts from."""
        self.task.resume(found[1].step if found else 0, self.context)
        if found is None:
            self.task.start(engine)
            return
        folder, manifest = found
        load_training_state(folder, engine.states)
        engine.restore_loss_scale(manifest.loss_scale)

    def loader(self, engine: Engine, first_batch: int = 0) -> BatchLoader:
        """Return this process's training batches, starting at `first_batch` of the sample order."""
        return BatchLoader(
            self.train_data,
            seed=self.config.seed,
            micro_batch_size=engine.micro_batch_size,
            data_parallel_rank=self.context.data.rank,
            data_parallel_size=self.context.data.size,
            accumulation_steps=engine.accumulation_steps,
            start_step=first_batch,
            threads=self.config.data.threads,
            repeats=self.config.data.repeats,
            device=self.context.device,
        )

    def _callbacks(
        self,
        first_step: int,
        validate: Validate | None,
        interruption: StopOnSignal,
        log: LogMetrics,
        save: SaveCheckpoint,
        extra: Sequence[Callback],
    ) -> list[Callback]:
        """Return the callbacks in the order in which they are called.

        Callbacks that may request a checkpoint precede the extra ones, which depend on whether the
        step is saved; `save` itself is called by the loop, last.
        """
        settings, objective = self.config.training, self.objective
        replaced = ReportReplacedSamples(settings.log_every, self.train_data, self.context)
        hardware = WatchHardware(settings.log_every)
        # Hardware first: it measures the wait for the device, which is over once `log` has read the
        # loss.
        callbacks: list[Callback] = [hardware, log, save.record_stall, save.request_retry, replaced]
        if compiles_blocks(self.context.device):
            callbacks.insert(0, ReportCompilation(self.context))
        if validate is not None:
            callbacks.append(validate)
        callbacks += [*self._stopping, interruption]
        if settings.sample_every:
            callbacks.append(
                SampleImages(
                    self.config.folder,
                    self.task.validation,
                    objective=objective,
                    every=settings.sample_every,
                    num_images=settings.sample_images,
                )
            )
        callbacks += [*extra, collect_garbage]
        if self.context.is_main:
            callbacks.append(ShowProgress(first_step, settings.steps))
        return callbacks

    @property
    def _stopping(self) -> list[Callback]:
        """Return early stopping, if any."""
        return [] if self.task.stopping is None else [self.task.stopping]

    def _validate(self, interruption: StopOnSignal) -> Validate | None:
        settings = self.config.training
        if self.task.validation is None or not settings.validate_every:
            return None
        return Validate(
            self.task.validation,
            settings.validate_every,
            settings.validation_images,
            is_urgent=interruption.is_urgent,
        )

    def _checks(self, bad_steps: WatchBadSteps) -> list[Callback]:
        every, config = self.config.training.check_replicas_every, self.config
        if not every:
            return []
        skipped = bad_steps.batches_skipped
        return [
            CheckReplicas(
                every, config.checkpoint, self.train_data, seed=config.seed, batches_skipped=skipped
            )
        ]

    def _open_metrics(
        self, first_step: int, start: CheckpointManifest | None
    ) -> MetricsWriter | None:
        """Return the writer of the main process; its errors are raised on every process."""
        config, opened = self.config, list[MetricsWriter]()

        def open_here() -> None:
            metrics = MetricsWriter(
                config.folder,
                first_step=first_step,
                logging=config.logging,
                config=dict(leaves(config.model_dump(mode="json"))),
            )
            if start is not None:
                record_rollback(metrics, config.folder, start)
            opened.append(metrics)

        self.context.on_main(open_here)
        return opened[0] if opened else None

    def _snapshot(
        self, state: StepState, *, bad_steps: WatchBadSteps, start: CheckpointManifest | None
    ) -> Snapshot:
        engine = state.engine
        progress = TrainingProgress(
            step=state.step,
            samples_seen=state.step * self.config.training.batch_size,
            seed=self.config.seed,
            tokenizer=self.tokenizer,
            data=self.train_data.manifest.content,
            classes=self.objective.classes_of(self.train_data.manifest),
            words=words_of(self.config),
            origin=start.origin if start else None,
            loss_scale=engine.loss_scale(),
            batches_skipped=bad_steps.batches_skipped,
            losses=bad_steps.judge.history,
        )
        return Snapshot(self.config.folder, progress, engine.states, self.copies)

    def _prune(self) -> None:
        if self.context.is_main:
            keep, folder, stopping = self.config.checkpoint, self.config.folder, self.task.stopping
            best = stopping.best_of(saved_steps(folder)) if stopping else None
            prune(
                folder,
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                keep_at=keep.keep_at if best is None else (*keep.keep_at, best),
                # Rollbacks need the spacing that the config's checks assume.
                regular=keep.every if self.config.training.max_rollbacks else 0,
            )


def run_training(config: RunConfig, launch: Launch, *, device: str | None = None) -> None:
    """Join the job that the launcher started and train.

    Args:
        launch: this process's place in the job.
        device: `cpu` or `cuda`; default: the best available.

    Raises:
        UserError: the run cannot be trained with this config.
    """
    job = open_job(config, launch, device=device)
    # Handle signals before joining the job: a signal that ended this process while it joins would
    # leave the others waiting.
    with forgiving_messages(), Signals() as signals, job as context:
        train_in_job(config, context, signals)


def train_in_job(
    config: RunConfig,
    context: ParallelContext,
    signals: Signals,
    extra_callbacks: Sequence[Callback] = (),
) -> None:
    """Open a run in a job of its layout, and train it; raises as `run_training` and `train`."""
    check_dashboards(config.logging)
    with permissions_needed():
        run = Trainer.open(config, context)
    with hold_run(config.folder, context), evaluate_during(config, context):
        run.train(signals, extra_callbacks)
