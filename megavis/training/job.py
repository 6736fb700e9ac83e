"""Join the launcher's job in the config's layout, and reject what the device does not support."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from deepspeed.accelerator import get_accelerator

from megavis.config.checks import require_world
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig, TrainingConfig
from megavis.config.section import ParallelConfig
from megavis.model.kernel_compiler import require_compiled
from megavis.model.kernels import choose_kernels, chosen_kernels
from megavis.parallel.context import (
    ParallelContext,
    end_engines,
    leave_context,
    open_context,
    require_device,
)
from megavis.parallel.device import choose_device, select_device
from megavis.parallel.launch import Launch
from megavis.training.faults.watchdog import collective_timeout

_FP8_CAPABILITY = (8, 9)


@contextlib.contextmanager
def open_job(
    config: RunConfig, launch: Launch, *, device: str | None = None
) -> Iterator[ParallelContext]:
    """Join the launcher's job in the config's layout, and leave it at the end.

    Args:
        launch: this process's place in the job.
        device: `cpu` or `cuda`; default: the best available.

    Raises:
        UserError: the config does not fit the number of processes or the device.
    """
    require_world(config, launch.world_size)
    _order_launches(config.parallel)
    place = choose_device(device, local_rank=launch.local_rank)
    require_device(place.type)
    select_device(place)
    # This asks DeepSpeed's accelerator, which `select_device` has set.
    _require_precision(config.training)
    _require_engine(config.training, place)
    _require_deterministic(config, place)
    training = config.training
    with contextlib.ExitStack() as closing:
        closing.callback(choose_kernels, chosen_kernels())
        # Before any layer is built, since blocks then look up the library.
        choose_kernels(training.kernels)
        context = open_context(
            launch,
            config.parallel,
            device=device,
            timeout_seconds=collective_timeout(training.hang_timeout),
            tf32=training.tf32,
            deterministic=training.deterministic,
        )
        closing.push(lambda failure, *_: leave_context(has_failed=failure is not None))
        require_compiled(context)
        yield context
        end_engines()  # Not after a failure: ending one waits for its device.


def _order_launches(parallel: ParallelConfig) -> None:
    """With a tensor group, make a GPU start kernels in the order in which they are issued.

    Megatron-Core issues a collective before the matrix product that it overlaps with, and relies on
    this order up to Hopper. Not under ZeRO-3, whose gathers are issued after the previous layer. A
    variable set by the user is kept. CUDA reads it on startup, so this must come first.
    """
    if parallel.tensor_model_parallel_size > 1 and parallel.zero_stage < 3:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _require_precision(training: TrainingConfig) -> None:
    """Reject a precision that the device does not support, before anything is started."""
    if training.precision != "fp16":
        return
    # DeepSpeed rejects it too, but later and without naming the key.
    if not get_accelerator().is_fp16_supported():
        text = "fp16 needs a GPU, or a CPU that supports it; the nearest choice here is bf16"
        raise UserError(text, key="training.precision")


def _require_engine(training: TrainingConfig, device: torch.device) -> None:
    """Reject Transformer Engine, or FP8, on a device that does not support it."""
    if training.kernels != "transformer_engine":
        return
    if device.type != "cuda":
        text = f"transformer_engine needs a GPU, and the device is {device.type}; use auto here"
        raise UserError(text, key="training.kernels")
    capability = torch.cuda.get_device_capability(device)
    if training.fp8 and capability < _FP8_CAPABILITY:
        text = "needs a GPU of compute capability 8.9 or newer (Ada, Hopper or Blackwell), not"
        found = ".".join(map(str, capability))
        raise UserError(f"{text} {found}; use false here", key="training.fp8")


def _require_deterministic(config: RunConfig, device: torch.device) -> None:
    """Reject deterministic training of a head that has no such kernels on a GPU."""
    tuned = config.finetune
    if not config.training.deterministic or device.type != "cuda" or tuned is None:
        return
    if tuned.task == "segments":
        # `adaptive_avg_pool2d` and the cross-entropy of maps.
        text = "finetune.task segments has no deterministic kernels on a GPU; use false here"
        raise UserError(text, key="training.deterministic")
