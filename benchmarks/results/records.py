"""Records of finished methods: the files of their runs that the tables read, without weights.

A few kilobytes per run. They are kept next to the page, so that another machine can continue a
study and write the tables of all finished methods.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.results.driver import TIMES
from benchmarks.results.tasks import Task, TrainedMethod
from megavis.training.metrics import read_json_lines

_FILES = ("config.yaml", "starts.jsonl", "metrics.jsonl", "evaluation/*.json")


_Method = TypeVar("_Method", bound=TrainedMethod)


class AnyStudy(Protocol[_Method]):
    """A study whose methods are kept."""

    @property
    def methods(self) -> Sequence[_Method]:
        """All methods, in the order in which they run."""
        ...

    def trainings(self, method: _Method) -> Iterable[Task]:
        """Return the commands of a method, including its trainings."""
        ...


class Records:
    """A folder laid out as that of a study.

    Args:
        folder: folder with `runs/` and `times.jsonl`; created when the first method is kept.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is read yet."""
        self.folder = folder

    def copy_to(self, study: AnyStudy[_Method], folder: Path) -> list[_Method]:
        """Copy the records of methods that have not been trained in the study's folder.

        A method trained on other numbers of images does not belong to the study.

        Returns:
            The methods that need not be trained.
        """
        found = [
            method
            for method in study.methods
            if _is_finished(study, method, self.folder)
            and not any((folder / run / "checkpoints").exists() for run in method.runs)
        ]
        for method in found:
            _copy(method, self.folder, folder)
        return found

    def keep(self, study: AnyStudy[_Method], folder: Path) -> None:
        """Copy every method that has finished in the study's folder."""
        for method in study.methods:
            if _is_finished(study, method, folder):
                _copy(method, folder, self.folder)


def _is_finished(study: AnyStudy[_Method], method: _Method, folder: Path) -> bool:
    if not (folder / method.last_result).exists():
        return False
    steps = [task.steps for task in study.trainings(method) if task.steps]
    return steps == [_last_step(folder / run) for run in method.runs]


def _last_step(run: Path) -> int:
    return max((line["step"] for line in read_json_lines(run / "metrics.jsonl")), default=0)


def _copy(method: TrainedMethod, source: Path, target: Path) -> None:
    """Copy the small files of a method's runs, and the times that the target lacks."""
    for run in method.runs:
        for path in (path for pattern in _FILES for path in sorted((source / run).glob(pattern))):
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    known = read_json_lines(target / TIMES)
    with (target / TIMES).open("a", encoding="utf-8") as file:
        for line in read_json_lines(source / TIMES):
            if Path(line["done"]) in method.runs and line not in known:
                file.write(json.dumps(line) + "\n")
