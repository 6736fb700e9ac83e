"""Append-only records of a run: starts, commands and faults.

`starts.jsonl` has a line for the first start and each resume, `commands.jsonl` one for each
`megavis` command on the run, to reproduce both. `faults.jsonl` records hardware faults that
ended a job. Unlike `metrics.jsonl`, no line is dropped when its step is repeated.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megavis.data.format.files import to_json
from megavis.training.metrics import read_json_lines

STARTS_NAME = "starts.jsonl"
COMMANDS_NAME = "commands.jsonl"
FAULTS_NAME = "faults.jsonl"
PACKAGES = ("megavis", "torch", "deepspeed", "megatron-core", "numpy")


def record_start(run_folder: Path, first_step: int, **facts: Any) -> None:
    """Add a line; called on the main process. Raises OSError.

    Args:
        first_step: step from which it resumes.
        facts: facts about the job, such as device and number of processes.
    """
    content = {
        "command": command_line(sys.argv),
        "first_step": first_step,
        **facts,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions(),
    }
    _append(run_folder / STARTS_NAME, content)


def record_command(run_folder: Path, arguments: Sequence[str]) -> None:
    """Add a line about a command that used the run. Raises OSError."""
    _append(run_folder / COMMANDS_NAME, {"command": command_line(["megavis", *arguments])})


def record_fault(run_folder: Path, step: int, what: str, *, exit_code: int) -> None:
    """Add a line about a fault that ended the job after a step; called on the main process.

    Raises OSError.
    """
    _append(run_folder / FAULTS_NAME, {"step": step, "exit_code": exit_code, "what": what})


def _append(path: Path, content: Mapping[str, Any]) -> None:
    time = datetime.now(UTC).isoformat(timespec="seconds")
    line = to_json({"time": time, **content}).encode() + b"\n"
    with path.open("a+b") as file:
        if size := file.tell():
            file.seek(size - 1)
            # A full disk or a kill may have cut off the last line, which must not spoil this one.
            line = line if file.read() == b"\n" else b"\n" + line
        file.write(line)


def read_starts(run_folder: Path) -> list[dict[str, Any]]:
    """Return all starts, oldest first; empty for runs from before starts were recorded."""
    return read_json_lines(run_folder / STARTS_NAME)


def read_commands(run_folder: Path) -> list[dict[str, Any]]:
    """Return all recorded commands, oldest first."""
    return read_json_lines(run_folder / COMMANDS_NAME)


def read_faults(run_folder: Path) -> list[dict[str, Any]]:
    """Return all faults, oldest first."""
    return read_json_lines(run_folder / FAULTS_NAME)


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as typed, without the path of the executable."""
    program, *words = arguments
    name = "megavis" if Path(program).name in ("megavis", "cli.py") else Path(program).name
    return shlex.join([name, *words])


def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
