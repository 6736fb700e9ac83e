"""Run the commands of a study one after another; a signal ends the running one after a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from benchmarks.results.tasks import ROOT, Task
from megavis.config.errors import UserError
from megavis.training.metrics import read_json_lines

TIMES = "times.jsonl"
_PROGRAMS = {"megavis": "megavis.cli", "data_tools": "data_tools"}
_LOG = "study.log"
_LAST_LINES = 12


class InterruptedStudyError(Exception):
    """A signal has ended the study.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, number: int) -> None:
        """Record the signal."""
        super().__init__(number)
        self.signal = number


def run_tasks(tasks: Iterable[Task], folder: Path, *, say: Callable[[str], None]) -> None:
    """Run each command that has not finished, and evaluations of what has been made anew since.

    Output goes to `study.log` in the folder, and the time of each command to `times.jsonl`.

    Raises:
        UserError: a command failed, or ended without its result.
        InterruptedStudyError: SIGINT or SIGTERM arrived. Training has saved a checkpoint.
    """
    newest = -1
    for task in tasks:
        last = _last_lines(folder).get(task.made)
        is_old = task.is_evaluation and last is not None and _is_of_other(task, last, newest)
        if is_old or not task.is_done(folder):
            if is_old:
                (folder / task.done).unlink(missing_ok=True)
            say(f"$ {task}")
            _run(task, folder)
            last = _last_lines(folder)[task.made]
        if last is not None and task.is_evaluated:
            newest = max(newest, last[0])


def _is_of_other(task: Task, last: tuple[int, str], newest: int) -> bool:
    """Return whether a result is of earlier weights or images, or of another command."""
    number, command = last
    return number < newest or command != str(task)


def _last_lines(folder: Path) -> dict[str, tuple[int, str]]:
    """Return number and command of the last time at which each thing was made, if recorded."""
    lines = read_json_lines(folder / TIMES)
    return {line["done"]: (number, line["command"]) for number, line in enumerate(lines)}


def _run(task: Task, folder: Path) -> None:
    program = [sys.executable, "-m", _PROGRAMS[task.words[0]], *task.words[1:]]
    began, before = time.time(), os.times()
    with (folder / _LOG).open("a") as log, _Signals() as signals:
        log.write(f"\n$ {task}\n")
        log.flush()
        # A separate session: a terminal sends Ctrl-C to all processes, but it should arrive once.
        child = subprocess.Popen(  # noqa: S603 - words of this package
            program,
            cwd=folder,
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        signals.watch(child)
        code = child.wait()
    after = os.times()
    processor = sum(after[2:4]) - sum(before[2:4])
    _record(folder, task, time.time() - began, processor, began)
    if signals.caught is not None:
        raise InterruptedStudyError(signals.caught)
    if code != 0:
        raise UserError(f"`{task}` ended with exit code {code}:\n{_end(folder / _LOG)}")
    if not task.is_done(folder):
        raise UserError(f"`{task}` ended without {folder / task.done}; see {folder / _LOG}")


class _Signals:
    """Passes SIGINT and SIGTERM on to the running command."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.caught: int | None = None

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Pass signals on to a command, including one that arrived before it started."""
        self.child = child
        if self.caught is not None:
            child.send_signal(signal.SIGTERM)

    def __enter__(self) -> _Signals:
        both = (signal.SIGINT, signal.SIGTERM)
        self._before = {each: signal.signal(each, self._pass_on) for each in both}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)


def _environment() -> dict[str, str]:
    """Return the environment of a command: this checkout's modules, and waiting threads that sleep.

    Spinning threads take most of a core that others need; see launch/demo.sh.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return {**waiting, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _record(folder: Path, task: Task, seconds: float, processor: float, began: float) -> None:
    line = {
        "command": str(task),
        "done": task.made,
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime(began)),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "commit": commit(),
    }
    with (folder / TIMES).open("a") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """Return the checkout's commit, with a + if files differ from it; empty outside of git."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*"]
        words += ["--abbrev=8", "--dirty=+"]
        found = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
