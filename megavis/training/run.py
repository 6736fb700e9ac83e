"""A training run from config to finished: opens the data, resumes, and starts the loop."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from megavis.checkpoint.folder import latest_checkpoint, prune
from megavis.checkpoint.load import load_training_state
from megavis.checkpoint.manifest import read_manifest
from megavis.checkpoint.save import Progress, Snapshot
from megavis.config.errors import UnfinishedError
from megavis.config.load import LoadedConfig, dump_config
from megavis.config.schema import RunConfig
from megavis.data.files import write_atomically
from megavis.data.loader import BatchLoader, Readable
from megavis.data.manifest import PALETTE_NAME
from megavis.data.mixture import Samples
from megavis.data.transforms import training_transform
from megavis.objectives import build_objective
from megavis.objectives.classification import Classification
from megavis.objectives.trainable import Trainable
from megavis.parallel.context import ParallelContext, close_context, open_context
from megavis.parallel.launch import Launch
from megavis.training.beside import evaluation_beside
from megavis.training.engine import Engine
from megavis.training.finetune import Finetuning
from megavis.training.hooks import (
    CollectGarbage,
    Hook,
    LogMetrics,
    ShowProgress,
    StepState,
    TellSkippedSteps,
    Validate,
)
from megavis.training.interruption import StopOnSignal
from megavis.training.loop import train
from megavis.training.metrics import MetricsWriter
from megavis.training.open_data import open_held_out, open_training_data
from megavis.training.restarts import count_restart
from megavis.training.same_run import check_same_run, check_same_tokenizer
from megavis.training.samples import SampleImages
from megavis.training.saving import SaveCheckpoint
from megavis.training.starts import record_start
from megavis.training.watchdog import Watchdog


@dataclass
class TrainingRun:
    """Everything that a run needs, opened and checked."""

    config: RunConfig
    context: ParallelContext
    objective: Trainable
    train_data: Samples
    validation_data: Readable | None
    """Held-out images; in a fine-tuning run those that choose the step."""
    tokenizer: str | None
    """SHA-256 of what made the tokens of the shards, or makes them of images."""
    finetuning: Finetuning | None = None
    """Present in a fine-tuning run."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.folder)

    @classmethod
    def open(cls, loaded: LoadedConfig, context: ParallelContext) -> TrainingRun:
        """Open the data and refuse what does not fit.

        Raises:
            UserError: with the key and its line, when data and config do not go together.
        """
        config = loaded.config
        objective = build_objective(config, context)
        training = training_transform(config.data, seed=config.seed)
        train_data = open_training_data(loaded, training, objective)
        held_out, path = None, config.data.validation
        if path is not None:
            held_out = open_held_out(loaded, "data.validation", path, objective, train_data)
        # A tokenizer that does not fit is refused here, not by the first batch.
        tokenizer = train_data.manifest.identity or objective.tokenizer_identity
        if not isinstance(objective, Classification):
            return cls(config, context, objective, train_data, held_out, tokenizer)
        assert held_out is not None, "the config's checks want one"
        tuning = Finetuning.open(loaded, objective, train_data, held_out)
        return cls(config, context, objective, train_data, tuning.selection, tokenizer, tuning)

    def train(self, extra_hooks: Sequence[Hook] = ()) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        Raises:
            UnfinishedError: a signal asked this or another process to stop; the run is saved.
        """
        config, context = self.config, self.context
        checkpoint = self.checkpoint_to_resume()
        first_step = read_manifest(checkpoint).step if checkpoint else 0
        if self.finetuning is not None:
            self.finetuning.resume(first_step, context)
        interruption = StopOnSignal()
        save = SaveCheckpoint(config.checkpoint.every, self._snapshot, published=self._prune)
        hooks = self._hooks(first_step, interruption, save, extra_hooks)
        self._prepare_folder(first_step)
        count_restart(self.folder, first_step, config.training.max_restarts, context)
        engine = Engine(config, self.objective, context)
        if checkpoint is not None:
            manifest = load_training_state(
                checkpoint, layers=engine.layers, states=engine.states, context=context
            )
            engine.restore_loss_scale(manifest.loss_scale)
        elif self.finetuning is not None:
            self.finetuning.start(engine)
        metrics = MetricsWriter(self.folder, first_step=first_step) if context.is_main else None
        loader = BatchLoader(
            self.train_data,
            seed=config.seed,
            micro_batch_size=engine.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            accumulation_steps=engine.accumulation_steps,
            start_step=first_step,
            threads=config.data.threads,
        )
        watchdog = Watchdog(context, patience=config.training.hang_timeout)
        with loader, interruption, watchdog:
            train(
                engine,
                loader,
                first_step=first_step,
                last_step=first_step if self._is_over else config.training.steps,
                hooks=hooks,
                metrics=metrics,
                save=save,
                watchdog=watchdog,
            )
        if metrics is not None:
            metrics.close()
        if interruption.has_stopped:
            raise UnfinishedError(f"{self.folder} is saved; start it again and it goes on")
        if self.finetuning is not None:
            self.finetuning.finish(engine)

    @property
    def _is_over(self) -> bool:
        """True where a run that is started again had stopped early."""
        return self.finetuning is not None and self.finetuning.stopping.is_over

    def _hooks(
        self,
        first_step: int,
        interruption: StopOnSignal,
        save: SaveCheckpoint,
        extra: Sequence[Hook],
    ) -> list[Hook]:
        settings, paper = self.config.training, self.objective
        log = LogMetrics(
            settings.log_every,
            flops_per_image=paper.flops_per_image(),
            tokens_per_image=paper.num_tokens,
        )
        hooks: list[Hook] = [log, save.record_stall]
        if settings.precision != "fp16":
            hooks.append(TellSkippedSteps(settings.log_every, settings.max_skipped_steps))
        if self.validation_data is not None and settings.validate_every:
            hooks.append(
                Validate(
                    self.validation_data,
                    settings.validate_every,
                    settings.validation_images,
                    is_urgent=interruption.is_urgent,
                )
            )
        if self.finetuning is not None:
            hooks.append(self.finetuning.stopping)
        hooks.append(interruption)
        if settings.sample_every:
            hooks.append(
                SampleImages(
                    self.folder,
                    self.validation_data,
                    objective=paper,
                    every=settings.sample_every,
                    num_images=settings.sample_images,
                )
            )
        hooks += [*extra, CollectGarbage()]
        if self.context.is_main:
            hooks.append(ShowProgress(first_step, settings.steps))
        return [*hooks, log.restart_clock]

    def _snapshot(self, state: StepState) -> Snapshot:
        engine = state.engine
        progress = Progress(
            step=state.step,
            samples_seen=state.step * self.config.training.batch_size,
            seed=self.config.seed,
            tokenizer=self.tokenizer,
            loss_scale=engine.loss_scale(),
        )
        return Snapshot(
            self.folder, progress, layers=engine.layers, states=engine.states, context=self.context
        )

    def _prune(self) -> None:
        if self.context.is_main:
            keep = self.config.checkpoint
            best = self.finetuning.stopping.best_step if self.finetuning else None
            prune(
                self.folder,
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                keep_step=best,
            )

    def checkpoint_to_resume(self) -> Path | None:
        """Return the newest checkpoint; None where there is none.

        Raises:
            UserError: what the run was begun with is not what it would go on with.
        """
        checkpoint = latest_checkpoint(self.folder)
        if checkpoint is not None:
            check_same_tokenizer(checkpoint, self.train_data, self.tokenizer)
            check_same_run(self.folder / "config.yaml", self.config)
        return checkpoint

    def _prepare_folder(self, first_step: int) -> None:
        if not self.context.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "config.yaml", dump_config(self.config).encode())
        palette = self.train_data.directory / PALETTE_NAME
        if palette.exists():
            shutil.copyfile(palette, self.folder / PALETTE_NAME)
        device = self.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        record_start(self.folder, first_step, processes=self.context.world.size, device=name)


def _require_device(loaded: LoadedConfig, device: str | None) -> None:
    """Refuse a precision that the device cannot compute in, before anything is started."""
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if loaded.config.training.precision != "fp16" or on_gpu:
        return
    # DeepSpeed refuses it too, but later and without naming the key.
    if not get_accelerator().is_fp16_supported():
        text = "fp16 needs a GPU, or a CPU that computes in it; the nearest choice here is bf16"
        raise loaded.source.error([("training.precision", text)])


@contextlib.contextmanager
def open_job(
    loaded: LoadedConfig, launch: Launch, *, device: str | None = None
) -> Iterator[ParallelContext]:
    """Join the job that the launcher started, in the config's layout, and leave it in the end.

    Args:
        loaded: the checked config.
        launch: this process's place in the job.
        device: `cpu` or `cuda`; what the machine has when None.

    Raises:
        UserError: the config does not fit the number of processes or the device.
    """
    loaded.require_world(launch.world_size)
    _require_device(loaded, device)
    parallel = loaded.config.parallel
    context = open_context(
        launch,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        device=device,
    )
    try:
        yield context
    finally:
        close_context()


def run_training(
    loaded: LoadedConfig, launch: Launch, *, device: str | None = None, hooks: Sequence[Hook] = ()
) -> None:
    """Join the job that the launcher started and train.

    Args:
        loaded: the checked config.
        launch: this process's place in the job.
        device: `cpu` or `cuda`; what the machine has when None.
        hooks: side jobs besides the usual ones.
    """
    with open_job(loaded, launch, device=device) as context:
        run = TrainingRun.open(loaded, context)
        with evaluation_beside(run.config, is_main=context.is_main):
            run.train(hooks)
