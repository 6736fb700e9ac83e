"""Select the device of a process, and the arithmetic of its kernels."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megavis.config.errors import UserError

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Element types by the name of the precision in a config or option."""
# torch's original, restored for a job on a GPU that follows one on the CPU.
_CURRENT_CUDA_DEVICE = torch.cuda.current_device


def device_kind(given: object) -> str:
    """Return `cpu` or `cuda` for a device as a user names it, also by a `torch.device`.

    Raises:
        UserError: it is another one, or one GPU of several.
    """
    if str(given) not in ("cpu", "cuda"):
        text = f"device {str(given)!r}: choose cpu or cuda"
        raise UserError(f"{text}; CUDA_VISIBLE_DEVICES selects a GPU")
    return str(given)


def choose_device(name: str | None, *, local_rank: int) -> torch.device:
    """Return the device of a process under any launcher.

    If only one GPU is visible to the process (`srun --gpus-per-task=1`, `--gpu-bind`), it is
    `cuda:0` for every local rank.

    Args:
        name: `cpu` or `cuda`; by default CUDA if available.
        local_rank: rank of the process on its node.

    Raises:
        UserError: no GPU is visible, or none for this process, or it is another device.
        RuntimeError: SLURM has given the job GPUs, and torch finds none: another node may have
            working ones.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    default = "cuda" if visible else "cpu"
    kind = device_kind(default if name is None else name)
    is_wanted = name is None or kind == "cuda"
    if is_wanted and not visible and (promised := _gpus_from_slurm(os.environ)):
        raise RuntimeError(
            f"torch finds no GPU on {socket.gethostname()}, although {promised} says that the job"
            " has some: check the node's driver, or use --device cpu if that is meant"
        )
    if kind != "cuda":
        return torch.device(kind)
    if not visible:
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise UserError(
            f"local rank {local_rank} has no GPU: {visible} are visible; start {visible} processes"
            " per node, or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def _gpus_from_slurm(environment: Mapping[str, str]) -> str | None:
    """Return a variable by which SLURM gives the job GPUs, with its value; None without GPUs."""
    # The first is a count; the others list numbers of GPUs, of which 0 is the first.
    for name, nothing in (
        ("SLURM_GPUS_ON_NODE", "0"),
        ("SLURM_JOB_GPUS", ""),
        ("SLURM_STEP_GPUS", ""),
    ):
        value = environment.get(name, "")
        if value not in ("", nothing):
            return f"{name}={value}"
    return None


def select_device(device: torch.device) -> None:
    """Make torch, DeepSpeed and Megatron-Core use a device.

    By default DeepSpeed uses CUDA whenever there is a GPU. Megatron's collectives allocate buffers
    on `torch.cuda.current_device()`, which raises without CUDA; on a CPU it is replaced by a
    function that returns `cpu`.
    """
    _select_accelerator(device.type)
    if device.type == "cuda":
        torch.cuda.current_device = _CURRENT_CUDA_DEVICE
        torch.cuda.set_device(device)
    else:
        patch_megatron_device(device.type)


def patch_megatron_device(device: str) -> None:
    """Make Megatron's collectives allocate their buffers on a device other than CUDA."""
    # torch declares an index, but Megatron's allocations also accept a device.
    torch.cuda.current_device = lambda: torch.device(device)  # type: ignore[assignment,return-value]


def _select_accelerator(name: str) -> None:
    from deepspeed import accelerator
    from deepspeed.runtime.utils import PartitionedTensor

    if accelerator.get_accelerator().device_name() != name:
        kind = "CUDA_Accelerator" if name == "cuda" else "CPU_Accelerator"
        module = getattr(accelerator, f"{name}_accelerator")
        accelerator.set_accelerator(getattr(module, kind)())
    # This default argument was bound to the accelerator found when DeepSpeed was imported.
    PartitionedTensor.from_meta.__func__.__defaults__ = (name,)


def set_arithmetic(*, tf32: bool, deterministic: bool) -> contextlib.ExitStack:
    """Set float32 precision and determinism on GPUs; call before the first matrix product.

    Args:
        tf32: allow TensorFloat-32 in float32 matrix products and convolutions.
        deterministic: use only bitwise deterministic kernels. Operations without one raise
            `RuntimeError`.

    Returns:
        A context manager that restores the previous settings on exit.
    """
    before = contextlib.ExitStack()
    for owner, name, value in (
        (torch.backends.cuda.matmul, "allow_tf32", tf32),
        (torch.backends.cudnn, "allow_tf32", tf32),
        (torch.backends.cudnn, "deterministic", deterministic),
        # Uninitialised memory is never read.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ):
        before.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    before.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
    # cuDNN's attention, preferred on Hopper, has a nondeterministic backward pass.
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    before.callback(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
    )
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # In-switch reductions (NVLS) add in the order of arrival.
        wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
        missing = {name: value for name, value in wanted.items() if name not in os.environ}
        before.enter_context(set_variables(missing))
    return before


@contextlib.contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Disable TensorFloat-32 inside the block, whatever the run's setting.

    For frozen networks whose outputs are stored or compared: TensorFloat-32 changes them by 1e-3.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class DeviceConstant:
    """A tensor that is copied to each device only once, so that steps do not wait for the host."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on this device."""
        if device not in self._copies:
            # A copy from pageable memory waits for the device, so only the first step does.
            self._copies[device] = self._value.to(device)
        return self._copies[device]
