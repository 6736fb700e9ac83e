"""Select the device that a process computes on, and its numerical precision."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megavis.config.errors import UserError

_CURRENT_CUDA_DEVICE = torch.cuda.current_device


def choose_device(name: str | None, *, local_rank: int) -> torch.device:
    """Return the device of a process; the same answer on every kind of launcher.

    A launcher may show each process a GPU of its own (`srun --gpus-per-task=1`, `--gpu-bind`),
    which is `cuda:0` whatever the local rank.

    Args:
        name: `cpu` or `cuda`; what the machine has when None.
        local_rank: of the process on its node.

    Raises:
        UserError: no GPU is visible, or none for this process.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cuda":
        return torch.device(name)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise UserError(
            f"process {local_rank} of this node, counted from 0, has no GPU: {visible} are visible;"
            f" start {visible} processes a node, or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def select_device(device: torch.device) -> None:
    """Let torch, DeepSpeed and Megatron-Core compute on a device.

    DeepSpeed takes CUDA wherever there is a GPU. Megatron's collectives allocate buffers on
    `torch.cuda.current_device()`, which raises without CUDA: on a CPU it answers `cpu`, so that
    the same code runs.
    """
    _select_accelerator(device.type)
    if device.type == "cuda":
        torch.cuda.current_device = _CURRENT_CUDA_DEVICE
        torch.cuda.set_device(device)
    else:
        answer_megatron(device.type)


def answer_megatron(device: str) -> None:
    """Let Megatron's collectives allocate their buffers on a device that is not CUDA's."""
    # torch declares an index; the allocations that Megatron makes take a device as well.
    torch.cuda.current_device = lambda: torch.device(device)  # type: ignore[assignment,return-value]


def _select_accelerator(name: str) -> None:
    from deepspeed import accelerator
    from deepspeed.runtime.utils import PartitionedTensor

    if accelerator.get_accelerator().device_name() != name:
        kind = "CUDA_Accelerator" if name == "cuda" else "CPU_Accelerator"
        module = getattr(accelerator, f"{name}_accelerator")
        accelerator.set_accelerator(getattr(module, kind)())
    # A default argument, which holds the accelerator that was found when DeepSpeed was imported.
    PartitionedTensor.from_meta.__func__.__defaults__ = (name,)


def set_arithmetic(*, tf32: bool, deterministic: bool) -> None:
    """Choose how exact float32 is on GPUs, and whether equal steps give equal bits.

    Args:
        tf32: round the factors of float32 products and convolutions to TensorFloat-32.
        deterministic: only kernels that give the same bits every time. An operation that has none
            raises `RuntimeError`. Call this before the first product on a GPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    # First choice on Hopper, and its backward pass sums in any order.
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    # What nobody reads need not be filled. torch's types do not know this attribute.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Switches that add up (NVLS) do so in the order of arrival.
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products and convolutions exactly inside the block, whatever a run chose.

    For frozen networks whose outputs are kept or compared: TensorFloat-32 moves them by 1e-3.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
