"""The folder of a run: its lock, the files that a start writes, and the check of a resumed run.

A config or data that would change a resumed run is rejected.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from megavis.checkpoint.format.folder import checkpoints_by_age, remove_partial, step_folder
from megavis.checkpoint.format.manifest import CheckpointManifest
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError, counted, permissions_needed
from megavis.config.load import dump_config
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.data.format.folder_lock import SILENCE_SECONDS, FolderLock
from megavis.data.format.manifest import PALETTE_NAME
from megavis.data.loading.blended_dataset import Samples
from megavis.grammar.same_run import check_same_run, check_same_words
from megavis.parallel.context import ParallelContext
from megavis.parallel.progress_bar import is_quiet
from megavis.training.faults.interruption import is_automatic
from megavis.training.provenance import record_start

_MOST_OF_START = 0.02
"""Share of the first step's weights in the average at the end of a run, above which it warns."""


@contextlib.contextmanager
def hold_run(run_folder: Path, context: ParallelContext) -> Iterator[None]:
    """Hold the lock of a run folder; called on every process of the job.

    Raises:
        UserError: on every process, if another job holds it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            # A scheduler may restart before the last process of the previous job has ended.
            patience = SILENCE_SECONDS if is_automatic(os.environ) else 0.0
            with permissions_needed(f"{run_folder} cannot be written"):
                stack.enter_context(FolderLock(run_folder, patience=patience))

        context.on_main(lock)
        yield


def prepare_folder(
    config: RunConfig,
    objective: Trainable,
    train: Samples,
    first_step: int,
    context: ParallelContext,
) -> None:
    """Write config and palette to the run folder, and record the start; on the main process."""
    folder, steps = config.folder, config.training.steps
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder)
    if first_step >= steps:
        taken = f"it has taken {counted(first_step, 'step')}, and training.steps is {steps}"
        sys.stderr.write(f"{folder} is finished: {taken}; raise it to train further\n")
    elif (warning := config.objective.warning(config)) and not (
        config.finetune or config.training.sample_every  # rejected with the same reason
    ):
        sys.stderr.write(f"WARNING: {warning}\n")
    if config.parallel.pipeline_model_parallel_size > 1 and config.parallel.zero_stage > 1:
        sys.stderr.write(
            f"WARNING: pipeline stages with parallel.zero_stage {config.parallel.zero_stage} are"
            " experimental: they rely on private parts of DeepSpeed; use zero_stage 1\n"
        )
    if first_step < steps and (of_average := warning_of_average(config)):
        sys.stderr.write(f"WARNING: {of_average}\n")
    # A finished run keeps the config that it was trained with; fine-tuning may evaluate again.
    if first_step < steps or config.finetune is not None:
        write_atomically(folder / "config.yaml", dump_config(config).encode())
    # Sampling reads the palette only from the run folder; the shards may be gone by then.
    palette = Path(config.data.palette or train.directory / PALETTE_NAME)
    if palette.exists():
        write_atomically(folder / PALETTE_NAME, palette.read_bytes())
    device, likelihood = context.device, objective.likelihood
    facts = {
        "processes": context.world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "likelihood": None if likelihood is None else asdict(likelihood),
    }
    if not is_quiet():
        where = f"{facts['device']}, {counted(context.world.size, 'process', 'processes')}"
        sys.stderr.write(f"{folder}: on {where}\n")
    record_start(folder, first_step, **facts)


def warning_of_average(config: RunConfig) -> str | None:
    """Return a warning if a run's average of the weights will consist of early ones; else None."""
    decay, steps = config.optimizer.ema_decay, config.training.steps
    of_start = decay ** (steps - 1)
    if not decay or of_start < _MOST_OF_START:
        return None
    # e^-5 of the first step's weights are left.
    shorter = max(0.0, 1.0 - 5.0 / steps)
    return (
        f"optimizer.ema_decay {decay:g} leaves {100 * of_start:.0f} % of the first step's weights"
        f" in the average after {counted(steps, 'step')}, and validation, samples and whatever"
        f" opens the run use the average; {f'{shorter:.6g} leaves 1 %' if shorter else 'use 0'}"
    )


def check_same_origin(
    config: RunConfig, manifest: CheckpointManifest, data: Samples, tokenizer: str | None
) -> None:
    """Compare words, tokenizer and training data with a checkpoint's; the latter two by SHA-256.

    Raises:
        UserError: they differ; other data of the same tokenizer is allowed by `data.may_change`.
    """
    checkpoint = step_folder(config.folder, manifest.step)
    check_same_words(checkpoint, manifest.words, config, resumes=True)
    before = manifest.tokenizer
    if before != tokenizer:
        raise UserError(
            f"{data.directory}: its {data.manifest.tokenizer_name} {str(tokenizer)[:12]} is not the"
            f" one of the run's step {manifest.step}, {str(before)[:12]}; use the one that the run"
            " was started with, or choose another name"
        )
    if manifest.data in (None, data.manifest.content) or config.data.may_change:
        return
    folders = ", ".join(source.path for source in config.data.train_sources)
    raise UserError(
        f"{folders} with {counted(data.manifest.num_samples, 'image')} is not the data"
        f" that the run's step {manifest.step} was trained on, on which its sample order depends;"
        " use that data, choose another name, or allow it with data.may_change=true",
        key="data.train",
    )


def check_earlier_run(config: RunConfig) -> None:
    """Compare a config with the run in its folder, if there is one.

    Raises:
        UserError: see `check_same_run`.
    """
    folder = config.folder
    if checkpoints_by_age(folder):
        check_same_run(folder / "config.yaml", config)
