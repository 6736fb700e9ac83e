"""What a test can change for all tests after it in its process."""

import contextlib
import gc
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Variables of pytest, and those that DeepSpeed, OpenMP and Inductor set when they are first used.
OTHERS = re.compile("PYTEST_|PYTORCH_NVML_BASED_CUDA_CHECK|KMP_|_?TORCHINDUCTOR_")
# The alarm of pytest-timeout, and signals that the C library keeps for its threads.
RESERVED = {signal.SIGALRM, 32, 33}
# Threads that tqdm, multiprocessing and fsspec start once in a process.
KEPT = re.compile(r"tqdm_monitor|.*\(_serve\)|fsspecIO|asyncio_\d+")
SECONDS_TO_END = 10.0


def process_state() -> dict[str, Any]:
    """Return limits, mask, folder, signals, environment and global settings of this process.

    Signals are those of the kernel: a library in C installs handlers that Python does not see.
    """
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    state: dict[str, Any] = {
        "umask": status["Umask"],
        "folder": os.getcwd(),
        # setuptools adds its own copies of packages.
        "sys.path": [path for path in sys.path if not path.endswith("_vendor")],
        "sys.dont_write_bytecode": sys.dont_write_bytecode,
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
    }
    for kind in ("SigBlk", "SigIgn", "SigCgt"):
        state[kind] = set(_numbers(int(status[kind], 16))) - RESERVED
    for name in dir(resource):
        # RLIMIT_OFILE is another name of RLIMIT_NOFILE.
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE":
            state[name] = resource.getrlimit(getattr(resource, name))
    for number in signal.valid_signals() - RESERVED:
        state[f"handler of signal {number}"] = signal.getsignal(number)
    for name, value in os.environ.items():
        if not OTHERS.match(name):
            state[f"variable {name}"] = value
    kernels = sys.modules.get("megavis.model.kernels")
    state["kernels"] = kernels.chosen_kernels() if kernels else "auto"
    return state | _torch_state()


def _numbers(bits: int) -> Iterator[int]:
    """Yield the numbers of the signals in one of the kernel's sets."""
    return (number + 1 for number in range(64) if bits >> number & 1)


def _torch_state() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        f"torch.{name}": read()
        for name, read in {
            "nn.functional.linear": lambda: torch.nn.functional.linear,
            "get_default_dtype": torch.get_default_dtype,
            "get_default_device": torch.get_default_device,
            "get_num_threads": torch.get_num_threads,
            "is_grad_enabled": torch.is_grad_enabled,
            "is_inference_mode_enabled": torch.is_inference_mode_enabled,
            "is_anomaly_enabled": torch.is_anomaly_enabled,
            "is_autocast_cpu_enabled": lambda: torch.is_autocast_enabled("cpu"),
            "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
            "get_float32_matmul_precision": torch.get_float32_matmul_precision,
            "backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
            "backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
            "backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
            "backends.cuda.flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
        }.items()
    }


def end_process_groups() -> None:
    """Collect the engines of closed jobs, which are cycles of references.

    Each of their groups has threads, which wake all the time: after some hundred files in one
    process they take most of a machine.
    """
    names = []
    for thread in Path("/proc/self/task").glob("*/comm"):
        # A thread may end between the listing and this.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(thread.read_text())
    # The last job's world group remains until the next job is opened.
    if sum(name.startswith("gloo") for name in names) > 1:
        gc.collect()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each entry that changed, and for each that came or went."""
    missing = "absent"
    # What a first import of torch brings was not there to be changed.
    names = [n for n in before | after if not n.startswith("torch.") or n in before]
    return [
        f"{name}: {before.get(name, missing)} before, {after.get(name, missing)} after"
        for name in names
        if before.get(name, missing) != after.get(name, missing)
    ]


def threads_left(before: set[threading.Thread]) -> list[str]:
    """Return the names of threads that did not run before and do not end within seconds."""
    until = time.monotonic() + SECONDS_TO_END
    while left := [
        thread.name
        for thread in set(threading.enumerate()) - before
        if not KEPT.fullmatch(thread.name)
    ]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return sorted(left)
