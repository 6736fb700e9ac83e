"""`megavis doctor`: what this machine has, and what is missing for what.

It has to run where torch is missing or broken, so what needs torch is imported inside functions.
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

from megavis.commands.quiet import quietly

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SystemCheck:
    """One thing that was looked for."""

    name: str
    found: bool
    detail: str
    """Version or place; what is wrong where it was not found."""
    purpose: str
    """What works only with it."""
    required: bool = False
    """True where nothing trains without it."""


def run(args: argparse.Namespace) -> int:
    """Look, and write a table or JSON; returns 0 where training can work."""
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
    """Yield all findings; what needs torch only where torch can be imported."""
    yield _python()
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
    yield apex()
    yield transformer_engine()
    yield from _compilers()
    yield _libaio()


def _python() -> SystemCheck:
    found = (3, 11) <= sys.version_info < (3, 13)
    return SystemCheck("Python", found, sys.version.split()[0], "3.11 or 3.12: everything", True)


def _package(module: str, distribution: str, purpose: str, required: bool = False) -> SystemCheck:
    """Import a module: a package that is installed and cannot be imported is of no use."""
    found, detail = _attempt(lambda: importlib.import_module(module))
    if found:
        detail = _version(distribution) or "version unknown"
    return SystemCheck(distribution, found, detail, purpose, required)


def _attempt(action: Callable[[], object]) -> tuple[bool, str]:
    """Return whether an action succeeded, and why it did not.

    A broken package may raise anything when it is imported, and the doctor has to continue.
    """
    try:
        action()
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return True, ""


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
    """Add numbers up in a job of one process: the shortest proof that the parts fit together."""
    summed = ""

    def add_up() -> None:
        nonlocal summed
        from megavis.parallel.context import close_context, open_context
        from megavis.parallel.launch import read_launch

        context = open_context(read_launch({}))
        try:
            summed = _all_reduce(context.device)
        finally:
            close_context()

    found, detail = _attempt(add_up)
    return SystemCheck("process group", found, detail or summed, "everything", True)


def _all_reduce(device: torch.device) -> str:
    """Return where a sum came out right. Raises RuntimeError where it did not."""
    import torch
    import torch.distributed as dist

    numbers = torch.arange(1024.0, device=device)
    dist.all_reduce(numbers)
    if float(numbers.sum()) != dist.get_world_size() * 1024 * 1023 / 2:
        raise RuntimeError(f"{dist.get_backend()} adds up wrongly on {device}")
    return f"{dist.get_backend()}, an all-reduce on {device}"


def apex() -> SystemCheck:
    """Look for NVIDIA Apex by a module that the unrelated PyPI package of that name lacks."""
    name, purpose = "NVIDIA Apex", "optimizer.implementation: apex"
    found, _ = _attempt(lambda: importlib.import_module("apex.optimizers"))
    if found:
        return SystemCheck(name, True, "apex.optimizers", purpose)
    detail = "not installed"
    if _version("apex") is not None:
        detail = "the installed 'apex' is another project of that name, not NVIDIA's"
    return SystemCheck(name, False, detail, purpose)


def transformer_engine() -> SystemCheck:
    """Look for Transformer Engine's torch half; the package alone may lack it."""
    name, purpose = "Transformer Engine", "nothing yet: megavis runs Megatron's own layers"
    found, detail = _attempt(lambda: importlib.import_module("transformer_engine.pytorch"))
    if found:
        return SystemCheck(name, True, _version("transformer-engine") or "version unknown", purpose)
    if detail.startswith("ModuleNotFoundError: No module named 'transformer_engine'"):
        detail = "not installed"
    return SystemCheck(name, False, detail, purpose)


def _compilers() -> Iterator[SystemCheck]:
    # The environment's own folder too: ninja comes from pip, and the environment may be inactive.
    folders = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    for tool in ("g++", "ninja"):
        place = shutil.which(tool, path=folders)
        purpose = "offload to NVMe (DeepSpeed compiles its file reader on first use)"
        yield SystemCheck(tool, place is not None, place or "not on the PATH", purpose)


def _libaio() -> SystemCheck:
    purpose = "offload to NVMe"
    if ctypes.util.find_library("aio") is None:
        return SystemCheck("libaio", False, "not installed", purpose)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    # DeepSpeed's own test links a program, so it needs the development files as well.
    found = bool(AsyncIOBuilder().is_compatible(verbose=False))
    detail = "library and development files" if found else "its development files are missing"
    return SystemCheck("libaio", found, detail, purpose)


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
