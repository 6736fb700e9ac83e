"""What a run writes down: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megavis.data.files import write_atomically


class MetricsWriter:
    """Appends one JSON object a logged step, and the same numbers as TensorBoard scalars."""

    def __init__(self, run_folder: Path, *, first_step: int) -> None:
        """Open a run's metrics for writing.

        Args:
            run_folder: the run.
            first_step: steps after it will be written again; what a killed run wrote about them
                is dropped, so that the file reads like that of an unbroken run.
        """
        # Here, so that whoever only reads metrics does not wait for torch.
        from torch.utils.tensorboard import SummaryWriter

        self._path = run_folder / "metrics.jsonl"
        drop_steps_after(self._path, first_step)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - lives with the run
        self._board = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show uint8 pixels `[h, w, 3]` in TensorBoard."""
        self._board.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._board.close()


def drop_steps_after(path: Path, step: int) -> None:
    """Cut `metrics.jsonl` after a step, and a last line that a kill left torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            continue
    write_atomically(path, "".join(kept).encode())


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`; none where the run has not begun."""
    return read_json_lines(run_folder / "metrics.jsonl")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return one JSON object a line; none where there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A kill may leave the last line torn.
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
