"""Dashboards that show a run while it trains: TensorBoard, Weights & Biases, MLflow.

`metrics.jsonl` is the record of a run; a dashboard shows the same numbers. Each is a class with the
same four methods, is opened again under the same identity when a run resumes, and writes to the run
folder unless its own environment variables name a server.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megavis.config.choices import DashboardKind
from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically

IDENTITIES = "dashboards.json"
"""In a run folder: under which identity each dashboard knows the run."""


class Dashboard(ABC):
    """What shows numbers and pictures of a run.

    Attributes:
        package: that has to be installed.
    """

    package: ClassVar[str]

    @abstractmethod
    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        """Open or reopen the run; steps after `first_step` will be shown again."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    @abstractmethod
    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show uint8 pixels `[h, w, 3]`."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still held back."""


class TensorBoard(Dashboard):
    """Event files in `RUN/tensorboard`."""

    package = "tensorboard"

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        board = importlib.import_module("torch.utils.tensorboard")
        folder = str(run_folder / "tensorboard")
        self._writer = board.SummaryWriter(folder, purge_step=first_step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Dashboard`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """See `Dashboard`."""
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """See `Dashboard`."""
        self._writer.close()


class WandB(Dashboard):
    """Weights & Biases; without a login or `WANDB_MODE` offline, in `RUN/wandb`."""

    package = "wandb"

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        self._wandb = importlib.import_module("wandb")
        has_login = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megavis"),
            name=run_folder.name,
            id=_identity(run_folder, "wandb", secrets.token_hex(4)),
            dir=str(run_folder),
            resume="allow",
            config=dict(config),
            # It would ask on the terminal, and a job waits forever.
            mode=os.environ.get("WANDB_MODE", "online" if has_login else "offline"),
        )
        # Its own count only grows; a resumed run shows steps again.
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
        # Newer versions refuse a file store unless this is set.
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
    """Check that what `logging` names is installed.

    Raises:
        UserError: a package is missing; says how to install it.
    """
    for kind, dashboard in DASHBOARDS.items():
        if kind in kinds and find_spec(dashboard.package) is None:
            raise UserError(
                f"logging: {kind} needs the package {dashboard.package}: pip install"
                f" 'megavis[{kind}]'"
            )


def open_dashboards(
    kinds: tuple[str, ...], run_folder: Path, *, first_step: int, config: Mapping[str, Any]
) -> list[Dashboard]:
    """Open those that `logging` names; `jsonl` is none of them, and is always written."""
    return [
        dashboard(run_folder, first_step=first_step, config=config)
        for kind, dashboard in DASHBOARDS.items()
        if kind in kinds
    ]


def _identity(run_folder: Path, kind: str, fresh: str | None) -> str | None:
    """Return the run's identity of a kind; a fresh one is kept where there is none."""
    path = run_folder / IDENTITIES
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if kind not in known and fresh is not None:
        known[kind] = fresh
        write_atomically(path, json.dumps(known).encode())
    return known.get(kind)
