"""Write metrics to `metrics.jsonl`, the record of a run, and show them in dashboards.

Dashboards are TensorBoard, Weights & Biases and MLflow. Each is a class with the same four methods,
keeps its identity when a run resumes, and writes to the run folder unless its own environment
variables name a server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from megavis.checkpoint.format.folder import watched_file
from megavis.config.errors import UserError
from megavis.config.section import DashboardKind
from megavis.data.format.files import append, from_json, to_json, write_atomically
from megavis.evaluation.event_files import EventFile


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
            first_step: later steps will be written again; a killed run's lines for them are
                dropped, so that the file equals an uninterrupted run's.
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
            # A run must be able to restart while a dashboard's server is down.
            with self._warn_on_error(Exception):
                if kind in logging:
                    opened = dashboard(run_folder, first_step=first_step, config=config or {})
                    self._dashboards.append(opened)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step, or warn if the disk fails.

        Unwritten lines are kept and written with the next one.
        """
        self._pending.append(to_json({"step": step, **values}) + "\n")
        with self._warn_on_error():
            self._write_pending()
        self._show(step, values)

    def _write_pending(self) -> None:
        """Append the pending lines, which remain pending if this fails. Raises OSError."""
        self._size = append(self._path, "".join(self._pending).encode(), size=self._size)
        self._pending.clear()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        self._on_dashboards(lambda dashboard: dashboard.scalars(step, values))

    def _on_dashboards(self, show: Callable[[Dashboard], None]) -> None:
        """Call a function with each dashboard; one that fails is disabled until the next start.

        In every call, a client may wait minutes for a server that is down. TensorBoard stays
        enabled: its files wait for the disk, as the run's own do.
        """
        working = []
        for dashboard in self._dashboards:
            if dashboard.waits_for_disk:
                working.append(dashboard)
            with self._warn_on_error(Exception):
                show(dashboard)
                if not dashboard.waits_for_disk:
                    working.append(dashboard)
        self._dashboards = working

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the last line if it belongs to this step, or write a new line.

        Warns if the disk fails; the line is then written with the next one.

        Raises:
            OSError: the file cannot be read.
        """
        written = self._path.read_bytes()[: self._size] if self._path.exists() else b""
        lines = [*written.splitlines(keepends=True), *(line.encode() for line in self._pending)]
        last = from_json(lines[-1]) if lines else {}
        if last.get("step") != step:
            self.write(step, values)
            return
        last.update(values)
        line = to_json(last) + "\n"
        if not self._pending:
            # The next line is written from there on.
            self._size -= len(lines[-1])
        self._pending[-1:] = [line]
        with self._warn_on_error():
            write_atomically(self._path, b"".join([*lines[:-1], line.encode()]))
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
    """Drop the lines of `metrics.jsonl` after a step, and damaged ones there.

    A kill leaves an incomplete last line. A node that loses its power may leave any of the latest
    lines damaged: a disk may have written later pages of the file and not earlier ones.

    Raises:
        UserError: a line before one that is kept is not a metrics record; names it.
        OSError: the file cannot be read or written.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    kept, damaged = [], 0
    for number, line in enumerate(before.splitlines(keepends=True), 1):
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            damaged = damaged or number
            continue
        if is_kept and damaged:
            text = "no JSON object with a step; restore the file, or remove the line"
            raise UserError(f"{path}, line {damaged}: {text}")
        if is_kept:
            kept.append(line.rstrip() + b"\n")
    content = b"".join(kept)
    # A full disk has no room for another copy of the file, and a run must be able to resume there.
    if not before.startswith(content):
        write_atomically(path, content)
    elif before != content:
        os.truncate(path, len(content))


def drop_watched(run_folder: Path, step: int) -> None:
    """Drop what `megavis evaluate watch` has measured after a step. Raises OSError.

    A damaged file is left to it, which names the line.
    """
    with contextlib.suppress(UserError):
        drop_steps_after(watched_file(run_folder), step)


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl` that have a step; none if it has not started."""
    lines = read_json_lines(run_folder / "metrics.jsonl")
    return [line for line in lines if type(line.get("step")) is int]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return one JSON object per line, with numbers unchanged; none if there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        # A kill may leave an incomplete last line, and a loss of power damaged ones.
        with contextlib.suppress(ValueError):
            records.append(from_json(line))
    return [record for record in records if isinstance(record, dict)]


IDENTITIES = "dashboards.json"
"""File in a run folder with the run's identity in each dashboard."""


class Dashboard(ABC):
    """Shows metrics and images of a run.

    Attributes:
        package: required package.
        waits_for_disk: whether calls may follow a failed one, and then write its values too.
    """

    package: ClassVar[str]
    waits_for_disk: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        """Open or reopen the run; steps after `first_step` will be shown again."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step."""

    @abstractmethod
    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show uint8 pixels `[h, w, 3]`."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class TensorBoard(Dashboard):
    """Event files in `RUN/tensorboard`."""

    package = "tensorboard"
    waits_for_disk = True

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        self._events = EventFile(run_folder)
        self._events.start_at(first_step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Dashboard`."""
        for name, value in values.items():
            self._events.add_scalar(step, name, value)
        self._events.write()

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """See `Dashboard`."""
        self._events.add_image(step, name, pixels)
        self._events.write()

    def close(self) -> None:
        """See `Dashboard`."""
        self._events.write()


class WandB(Dashboard):
    """Weights & Biases; offline in `RUN/wandb` without a login or `WANDB_MODE`."""

    package = "wandb"

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        # Without it, a server that stops answering would block the job's nodes at the end.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")
        self._wandb = importlib.import_module("wandb")
        has_login = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megavis"),
            name=run_folder.name,
            id=_identity(run_folder, "wandb", secrets.token_hex(4)),
            dir=str(run_folder),
            resume="allow",
            config=dict(config),
            # Otherwise it would prompt for a login and block the job.
            mode=os.environ.get("WANDB_MODE", "online" if has_login else "offline"),
        )
        # Its own step counter is monotonic, but a resumed run repeats steps.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Dashboard`."""
        self._run.log({"step": step, **values})

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """See `Dashboard`."""
        self._run.log({"step": step, name: self._wandb.Image(pixels)})

    def close(self) -> None:
        """See `Dashboard`."""
        self._run.finish()


class MLflow(Dashboard):
    """MLflow; without `MLFLOW_TRACKING_URI`, files in `RUN/mlflow`."""

    package = "mlflow"

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        # Newer versions reject a file store unless this is set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        here = (run_folder / "mlflow").resolve().as_uri()
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megavis")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        fresh = _identity(run_folder, "mlflow", None)
        if fresh is None:
            run = self._client.create_run(experiment, run_name=run_folder.name)
            fresh = _identity(run_folder, "mlflow", run.info.run_id)
            for key, value in config.items():
                self._client.log_param(fresh, key, str(value)[:500])
        self._identity = fresh
        self._client.update_run(self._identity, status="RUNNING")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Dashboard`."""
        for name, value in values.items():
            self._client.log_metric(self._identity, name, value, step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """See `Dashboard`."""
        image = importlib.import_module("PIL.Image").fromarray(pixels)
        self._client.log_image(self._identity, image, artifact_file=f"{name}-{step:08d}.png")

    def close(self) -> None:
        """See `Dashboard`."""
        self._client.set_terminated(self._identity)


DASHBOARDS: Mapping[DashboardKind, type[Dashboard]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def check_dashboards(kinds: tuple[str, ...]) -> None:
    """Check that the packages for `logging` are installed.

    Raises:
        UserError: a package is missing; the message says how to install it.
    """
    for kind, dashboard in DASHBOARDS.items():
        if kind in kinds and find_spec(dashboard.package) is None:
            text = f"{kind} needs the package {dashboard.package}: pip install 'megavis[{kind}]'"
            raise UserError(text, key="logging")


def _identity(run_folder: Path, kind: str, fresh: str | None) -> str | None:
    """Return the run's identity in a dashboard; store `fresh` if there is none yet."""
    path = run_folder / IDENTITIES
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if kind not in known and fresh is not None:
        known[kind] = fresh
        write_atomically(path, json.dumps(known).encode())
    return known.get(kind)
