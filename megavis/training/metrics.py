"""Write metrics to `metrics.jsonl` and to dashboards."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megavis.data.format.files import write_atomically
from megavis.training.dashboards import DASHBOARDS, Dashboard


class MetricsWriter:
    """Appends one JSON object per logged step, and shows the same values in dashboards."""

    def __init__(
        self,
        run_folder: Path,
        *,
        first_step: int,
        logging: tuple[str, ...] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a run's metrics for writing.

        Args:
            run_folder: the run.
            first_step: later steps will be written again; lines of a killed run about them are
                dropped, so the file equals that of an uninterrupted run.
            logging: kinds of dashboards.
            config: dotted keys and values to show in dashboards.
        """
        self._path = run_folder / "metrics.jsonl"
        # A restarted run also repeats its validation before the first step.
        drop_steps_after(self._path, first_step or -1)
        self._pending: list[str] = []
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._warned: set[str] = set()
        self._dashboards: list[Dashboard] = []
        for kind, dashboard in DASHBOARDS.items():
            # A run must start again while a dashboard's server is down.
            with self._warn_on_error(Exception):
                if kind in logging:
                    opened = dashboard(run_folder, first_step=first_step, config=config or {})
                    self._dashboards.append(opened)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step, or warn if the disk fails.

        Unwritten lines are kept and written with the next one.
        """
        self._pending.append(json.dumps({"step": step, **values}) + "\n")
        with self._warn_on_error():
            self._write_pending()
        self._show(step, values)

    def _write_pending(self) -> None:
        """Append the pending lines, which remain pending if this fails. Raises OSError."""
        content, written = "".join(self._pending).encode(), 0
        # Opened anew: on a network disk a full quota shows when a file is closed, and a file that
        # another host has replaced is stale. Unbuffered: a buffer discards what does not fit.
        with open(self._path, "ab", buffering=0) as file:
            # A failed attempt may have written some of them.
            start = min(self._size, os.fstat(file.fileno()).st_size)
            file.truncate(start)
            while written < len(content):
                written += file.write(content[written:])
        self._size = start + written
        self._pending.clear()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        self._on_dashboards(lambda dashboard: dashboard.scalars(step, values))

    def _on_dashboards(self, show: Callable[[Dashboard], None]) -> None:
        """Call a function with each dashboard; one that fails is given up until the next start.

        A client may wait for minutes, in every call, for a server that is down.
        """
        working = []
        for dashboard in self._dashboards:
            with self._warn_on_error(Exception):
                show(dashboard)
                working.append(dashboard)
        self._dashboards = working

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the last line if it is of this step, or write a new line.

        Raises:
            OSError: the file cannot be read, or not be written with the changed line.
        """
        written = self._path.read_bytes()[: self._size].decode()
        lines = [*written.splitlines(keepends=True), *self._pending]
        last = json.loads(lines[-1]) if lines else {}
        if last.get("step") != step:
            self.write(step, values)
            return
        last.update(values)
        write_atomically(self._path, "".join([*lines[:-1], json.dumps(last) + "\n"]).encode())
        self._size = self._path.stat().st_size
        self._pending.clear()
        self._show(step, values)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show uint8 pixels `[h, w, 3]`."""
        self._on_dashboards(lambda dashboard: dashboard.image(step, name, pixels))

    def close(self) -> None:
        """Flush to the disk and close.

        Raises:
            OSError: the last lines of `metrics.jsonl` cannot be written.
        """
        self._on_dashboards(lambda dashboard: dashboard.close())
        self._write_pending()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _warn_on_error(self, kind: type[Exception] = OSError) -> Iterator[None]:
        """Continue training without disk or dashboard, but warn once for each reason."""
        try:
            yield
        except kind as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                text = f"WARNING: metrics are not written: {error}; training continues"
                tqdm.write(text, file=sys.stderr)


def drop_steps_after(path: Path, step: int) -> None:
    """Truncate `metrics.jsonl` after a step, and drop an incomplete last line."""
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
    """Return the lines of a run's `metrics.jsonl`; none if the run has not started."""
    return read_json_lines(run_folder / "metrics.jsonl")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return one JSON object per line; none if there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A kill may leave an incomplete last line.
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
