"""The ten stages: their modules, and the processes of their parts."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu_check.results import Measure, Row, Settings
from megavis.parallel.launch import Launch

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        title: what it measures.
        module: module of this package, whose `parts(settings)` returns its parts by name.
        fresh: on a GPU, run every part in a new process, so that none inherits memory, kernels
            or settings.
        at_once: parts measure no time, so several may share a GPU.
        several: every part runs on `Settings.processes` processes, and rank 0's rows count.
    """

    title: str
    module: str
    fresh: bool = False
    at_once: bool = False
    several: bool = False


STAGES: Mapping[int, Stage] = {
    1: Stage("the machine", "machine", fresh=True),
    2: Stage("CPU against GPU", "against_cpu", at_once=True),
    3: Stage("ZeRO stages", "zero_stages", at_once=True),
    4: Stage("waits for the device", "waits", at_once=True),
    5: Stage("presets", "presets", fresh=True),
    6: Stage("decoding", "decoding", fresh=True),
    7: Stage("loader and saves", "loader_and_saves", fresh=True),
    8: Stage("equal runs, refit", "equal_runs"),
    9: Stage("a whole run", "whole_run", at_once=True),
    10: Stage("several GPUs", "several_gpus", fresh=True, several=True),
}


def count_gpus(launch: Launch) -> int:
    """Return how many GPUs torch finds; a job for `WorkerPool`."""
    import torch

    return torch.cuda.device_count()


def open_stage(
    launch: Launch, settings: Settings, number: int
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the machine's facts and the names of a stage's parts; a job for `WorkerPool`."""
    _prepare_process(settings)
    from benchmarks.gpu_check.machine import facts

    return facts(settings), tuple(_parts(settings, number))


def run_part(launch: Launch, settings: Settings, number: int, name: str) -> list[Row]:
    """Measure one part; a job for `WorkerPool`."""
    _prepare_process(settings)
    return _parts(settings, number)[name](launch, settings)


def _parts(settings: Settings, number: int) -> Mapping[str, Measure]:
    module = importlib.import_module(f"benchmarks.gpu_check.{STAGES[number].module}")
    parts: Mapping[str, Measure] = module.parts(settings)
    return parts


def end_with_parent(libc: ctypes.CDLL) -> None:
    """Have the kernel kill this process when its parent ends."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@functools.cache
def _prepare_process(settings: Settings) -> None:
    """Redirect libraries' output to a file, and end with the parent process."""
    end_with_parent(ctypes.CDLL(None))
    log = os.open(settings.folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
