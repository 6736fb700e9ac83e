"""Dashboards that show a run while it trains: TensorBoard, Weights & Biases, MLflow.

`metrics.jsonl` is the record of a run; dashboards show the same values. Each is a class with the
same four methods, keeps its identity when a run resumes, and writes to the run folder unless its
own environment variables name a server.
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

from megavis.config.errors import UserError
from megavis.config.section import DashboardKind
from megavis.data.format.files import write_atomically

IDENTITIES = "dashboards.json"
"""File in a run folder with the run's identity in each dashboard."""


class Dashboard(ABC):
    """Shows metrics and images of a run.

    Attributes:
        package: required package.
    """

    package: ClassVar[str]

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
    """Weights & Biases; offline in `RUN/wandb` without a login or `WANDB_MODE`."""

    package = "wandb"

    def __init__(self, run_folder: Path, *, first_step: int, config: Mapping[str, Any]) -> None:
        # Without it, a server that stops answering would hold the job's nodes at the end.
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
            raise UserError(
                f"logging: {kind} needs the package {dashboard.package}: pip install"
                f" 'megavis[{kind}]'"
            )


def _identity(run_folder: Path, kind: str, fresh: str | None) -> str | None:
    """Return the run's identity in a dashboard; store `fresh` if there is none yet."""
    path = run_folder / IDENTITIES
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if kind not in known and fresh is not None:
        known[kind] = fresh
        write_atomically(path, json.dumps(known).encode())
    return known.get(kind)
