"""Results of stages, as atomically written JSON files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.data.format.files import from_json, to_json, write_atomically
from megavis.parallel.launch import Launch

Value = float | int | bool | str | None


@dataclass(frozen=True)
class Settings:
    """Settings of all parts of all stages.

    Attributes:
        device: `cpu` or `cuda`.
        small: use tiny sizes, which run every code path without meaningful times.
        folder: the output folder.
        processes: processes of a stage with several: one per GPU, at most eight, or two on a CPU.
    """

    device: str
    small: bool
    folder: Path
    processes: int = 1

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Row:
    """One measurement; see the package's docstring for the fields."""

    what: str
    value: Value
    unit: str = ""
    aim: str = ""
    passed: bool | None = None
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of a stage, measured at once."""

    finished: bool
    seconds: float
    error: str = ""
    trace: str = ""
    rows: tuple[Row, ...] = ()


@dataclass
class StageResult:
    """The results of a stage so far."""

    stage: int
    title: str
    device: str
    small: bool
    finished: bool = False
    stopped: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def rows(self) -> list[Row]:
        """Rows of all parts."""
        return [row for part in self.parts.values() for row in part.rows]

    def as_json(self) -> dict[str, Any]:
        """Return the content of the stage's file."""
        return {**dataclasses.asdict(self), "seconds": self.seconds}

    def save(self, folder: Path) -> None:
        """Write the stage's file atomically."""
        text = to_json(self.as_json(), indent=2) + "\n"
        write_atomically(stage_path(folder, self.stage), text.encode())


def stage_path(folder: Path, stage: int) -> Path:
    """Return the file of a stage."""
    return folder / f"stage-{stage}.json"


def read_stage(folder: Path, stage: int) -> StageResult | None:
    """Return the saved results of a stage, or None.

    Raises:
        UserError: the file has another format.
    """
    path = stage_path(folder, stage)
    if not path.exists():
        return None
    try:
        tree = from_json(path.read_text(encoding="utf-8"))
        del tree["seconds"]
        tree["parts"] = {name: _part(part) for name, part in tree["parts"].items()}
        return StageResult(**tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a stage's file ({error}); delete it") from None


def _part(tree: dict[str, Any]) -> Part:
    return Part(**{**tree, "rows": tuple(Row(**row) for row in tree["rows"])})


Measure = Callable[[Launch, Settings], list[Row]]
"""A part: measures in a worker process and returns rows."""
