"""Check that kernels for a GPU can be compiled here, before training depends on them.

Triton compiles the launcher of each kernel with the machine's C compiler against `Python.h`. Slim
containers have neither, and the first step of a run would fail with Triton's error.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.kernels import choose_kernels, chosen_kernels
from megavis.parallel.context import ParallelContext


def compile_and_run(device: torch.device) -> None:
    """Compile a kernel as blocks do, run it on the device, and compare it with torch's own.

    Raises:
        RuntimeError: its result is wrong.
        Exception: whatever Inductor, Triton or the compiler raises.
    """

    def plain(x: Tensor) -> Tensor:
        return F.silu(x) * 2 + 1

    numbers = torch.linspace(-4, 4, 4096, device=device)
    difference = (torch.compile(plain)(numbers) - plain(numbers)).abs().max()
    if not float(difference) < 1e-5:
        raise RuntimeError(f"a compiled kernel computes wrong numbers on {device}")


def why_not_compiled(device: torch.device) -> str | None:
    """Return why kernels cannot be compiled, and what would help; None if they can."""
    try:
        compile_and_run(device)
    # Dynamo, Inductor, Triton and the compiler may raise any exception.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return missing_tool() or f"{type(error).__name__}: {lines[0]}"
    return None


def missing_tool() -> str | None:
    """Return which tool of Triton's launcher is missing, and what to install; None if none is."""
    compiler = os.environ.get("CC")
    if compiler and shutil.which(compiler) is None:
        return f"the C compiler that CC names, {compiler}, is missing: install it, or unset CC"
    if not compiler and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler: install gcc (Debian: apt-get install gcc), or set CC"
    # The scheme that Triton asks for; Debian's default one names a folder that does not exist.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"{header} is missing: install Python's headers (Debian: apt-get install {package})"
    return None


def require_compiled(context: ParallelContext) -> None:
    """Use plain kernels on all processes, with a warning, if one of them cannot compile.

    Collective over all processes; does nothing on a CPU and for plain kernels.

    Raises:
        UserError: on every process, if kernels of another library than torch were chosen.
    """
    library = chosen_kernels()
    if context.device.type != "cuda" or library == "torch":
        return
    reason = next(filter(None, context.gather(why_not_compiled(context.device))), None)
    if reason is None:
        return
    if library in ("apex", "transformer_engine"):
        text = f"{library}: kernels cannot be compiled: {reason}"
        raise UserError(text, key="training.kernels")
    choose_kernels("torch")
    if context.is_main:
        sys.stderr.write(
            f"WARNING: kernels cannot be compiled: {reason}; plain ones are used, which are"
            " slower (training.kernels: torch)\n"
        )
