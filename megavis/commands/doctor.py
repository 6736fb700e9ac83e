"""`megavis doctor`: what this machine provides, and what is missing.

It must run if torch is missing or broken, so functions import whatever needs torch.
"""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.commands.terminal import quietly

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SystemCheck:
    """Result of one check."""

    name: str
    found: bool
    detail: str
    """Version or path; what is wrong if it was not found."""
    purpose: str
    """What depends on it."""
    required: bool = False
    """Whether training depends on it."""


def run(args: argparse.Namespace) -> int:
    """Write a table or JSON of all checks; return 0 if training can work."""
    with quietly():
        findings = list(examine())
    can_train = all(finding.found for finding in findings if finding.required)
    if args.json:
        tree = {"can_train": can_train, "findings": [dataclasses.asdict(f) for f in findings]}
        sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    else:
        sys.stdout.write(_as_table(findings, can_train))
    return 0 if can_train else 1


def examine() -> Iterator[SystemCheck]:
    """Yield all checks; those that need torch only if it can be imported."""
    found = (3, 11) <= sys.version_info < (3, 14)
    yield SystemCheck("Python", found, sys.version.split()[0], "3.11 to 3.13: everything", True)
    for module, distribution, purpose in (
        ("torch", "torch", "everything"),
        ("megatron.core", "megatron-core", "the Transformer's layers"),
        ("deepspeed", "deepspeed", "ZeRO, pipelines, offload"),
        ("safetensors", "safetensors", "checkpoints"),
        ("torch.utils.tensorboard", "tensorboard", "the scalars and image grids of a run"),
    ):
        yield _package(module, distribution, purpose, required=True)
    for module, distribution in (("simplejpeg", "simplejpeg"), ("sklearn", "scikit-learn")):
        yield _package(module, distribution, "making palettes and shards from images")
    if "torch" in sys.modules:
        yield from _devices()
        yield _process_group()
        yield compiled_kernel()
    yield apex()
    yield transformer_engine()
    yield from _compilers()
    yield _libaio()


def _package(module: str, distribution: str, purpose: str, required: bool = False) -> SystemCheck:
    """Import a module: an installed package that cannot be imported is useless."""
    found, detail = _attempt(lambda: importlib.import_module(module))
    if found:
        detail = _version(distribution) or "version unknown"
    return SystemCheck(distribution, found, detail, purpose, required)


def _attempt(action: Callable[[], object]) -> tuple[bool, str]:
    """Return whether an action succeeded, and the text that it returned, if any, or why not.

    A broken package may raise anything on import, and the doctor must continue.
    """
    try:
        found = action()
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return True, found if isinstance(found, str) else ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[SystemCheck]:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    built = torch.version.cuda
    absent = f"torch is built for CUDA {built}, no GPU found" if built else "torch is a CPU build"
    purpose = "training at full size; without it all runs on the CPU"
    yield SystemCheck("CUDA", cuda, ", ".join(names) or absent, purpose)
    nccl = dist.is_nccl_available() and cuda
    detail = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "needs CUDA"
    yield SystemCheck("NCCL", nccl, detail, "several GPUs")
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else True
    where = "on the GPU" if cuda else "on the CPU, slowly"
    yield SystemCheck(
        "bf16", bf16, where if bf16 else "not on this GPU", "training.precision: bf16"
    )


def _process_group() -> SystemCheck:
    """Run an all-reduce in a job of one process: the shortest test that the parts work together."""

    def add_up() -> str:
        from megavis.parallel.context import close_context, joined_device, open_context
        from megavis.parallel.launch import read_launch

        context = open_context(read_launch({}), device=joined_device(None))
        try:
            return _all_reduce(context.device)
        finally:
            close_context()

    return SystemCheck("process group", *_attempt(add_up), "everything", True)


def _all_reduce(device: torch.device) -> str:
    """Return a description of a correct all-reduce. Raises RuntimeError if it is wrong."""
    import torch
    import torch.distributed as dist

    numbers = torch.arange(1024.0, device=device)
    dist.all_reduce(numbers)
    if float(numbers.sum()) != dist.get_world_size() * 1024 * 1023 / 2:
        raise RuntimeError(f"{dist.get_backend()} computes wrong sums on {device}")
    return f"{dist.get_backend()}, an all-reduce on {device}"


def compiled_kernel() -> SystemCheck:
    """Compile a Triton kernel and run it on the GPU; every run depends on it by default."""
    import torch

    name, purpose = "Triton kernel", "training.kernels: auto, the default on a GPU"
    if not torch.cuda.is_available():
        return SystemCheck(name, False, "not tried: there is no GPU to run one", purpose)

    def why_not() -> str:
        from megavis.model.kernel_compiler import why_not_compiled

        return why_not_compiled(torch.device("cuda")) or ""

    tried, reason = _attempt(why_not)
    detail = reason or f"compiled and run on {torch.cuda.get_device_name()}"
    return SystemCheck(name, tried and not reason, detail, purpose, required=True)


def apex() -> SystemCheck:
    """Look for NVIDIA Apex through a module that the unrelated PyPI package of that name lacks."""
    name, purpose = "NVIDIA Apex", "training.kernels: apex"
    found, _ = _attempt(lambda: importlib.import_module("apex.optimizers"))
    if found:
        return SystemCheck(name, True, "apex.optimizers", purpose)
    detail = "not installed"
    if _version("apex") is not None:
        detail = "the installed 'apex' is another project of that name, not NVIDIA's"
    return SystemCheck(name, False, detail, purpose)


def transformer_engine() -> SystemCheck:
    """Look for Transformer Engine's torch part, which the package may lack."""
    name, purpose = "Transformer Engine", "training.kernels: transformer_engine"
    found, detail = _attempt(lambda: importlib.import_module("transformer_engine.pytorch"))
    if found:
        return SystemCheck(name, True, _version("transformer-engine") or "version unknown", purpose)
    if detail.startswith("ModuleNotFoundError: No module named 'transformer_engine'"):
        detail = "not installed"
    return SystemCheck(name, False, detail, purpose)


def _compilers() -> Iterator[SystemCheck]:
    # Also look in the environment: ninja comes from pip, and the environment may be inactive.
    folders = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    for tool in ("g++", "ninja"):
        place = shutil.which(tool, path=folders)
        purpose = "offload to NVMe (DeepSpeed compiles its file reader on first use)"
        yield SystemCheck(tool, place is not None, place or "not on the PATH", purpose)


def _libaio() -> SystemCheck:
    purpose = "offload to NVMe"
    if ctypes.util.find_library("aio") is None:
        return SystemCheck("libaio", False, "not installed", purpose)

    def why_not() -> str:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        # DeepSpeed's own test links a program, so it also needs the development files.
        compatible = AsyncIOBuilder().is_compatible(verbose=False)
        return "" if compatible else "its development files are missing"

    tried, reason = _attempt(why_not)
    detail = reason or "library and development files"
    return SystemCheck("libaio", tried and not reason, detail, purpose)


def _as_table(findings: list[SystemCheck], can_train: bool) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = "yes" if finding.found else ("NO " if finding.required else "no ")
        line = f"{mark}  {finding.name:{width}}  {finding.detail}"
        if not finding.found:
            line += f"; needed for: {finding.purpose}"
        lines.append(line)
    lines.append("Training can work." if can_train else "Training cannot work: see NO above.")
    return "\n".join(lines) + "\n"
