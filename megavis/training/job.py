"""Join a launched job in a config's layout, and lock its run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.parallel.context import ParallelContext, close_context, open_context
from megavis.parallel.device import choose_device, select_device
from megavis.parallel.launch import Launch
from megavis.training.faults.restarts import is_automatic
from megavis.training.faults.run_lock import SILENCE_SECONDS, RunLock
from megavis.training.faults.watchdog import collective_timeout


def _require_precision(loaded: LoadedConfig) -> None:
    """Refuse a precision that the device cannot compute in, before anything is started."""
    if loaded.config.training.precision != "fp16":
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
    select_device(choose_device(device, local_rank=launch.local_rank))
    _require_precision(loaded)
    parallel, training = loaded.config.parallel, loaded.config.training
    context = open_context(
        launch,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        device=device,
        timeout_seconds=collective_timeout(training.hang_timeout),
        tf32=training.tf32,
        deterministic=training.deterministic,
    )
    try:
        yield context
    finally:
        close_context()


@contextlib.contextmanager
def hold_run(run_folder: Path, context: ParallelContext) -> Iterator[None]:
    """Be the only job that trains in a run folder; every process of the job calls this.

    Raises:
        UserError: on every process, where another job holds it.
    """
    refusal = ""
    with contextlib.ExitStack() as stack:
        if context.is_main:
            # A scheduler's restart may come before the last process of the job has ended.
            patience = SILENCE_SECONDS if is_automatic(os.environ) else 0.0
            try:
                stack.enter_context(RunLock(run_folder, patience=patience))
            except UserError as error:
                refusal = str(error)
        refusal = context.from_main(refusal)
        if refusal:
            raise UserError(refusal)
        yield
