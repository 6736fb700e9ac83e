"""Joining the job that a launcher started, in a config's layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from deepspeed.accelerator import get_accelerator

from megavis.config.load import LoadedConfig
from megavis.parallel.context import ParallelContext, close_context, open_context
from megavis.parallel.launch import Launch


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
