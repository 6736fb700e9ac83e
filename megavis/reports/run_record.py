"""Read a run folder without torch: config, metrics, starts, results and pictures."""

from __future__ import annotations

import csv
import functools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import CheckpointManifest, read_manifest
from megavis.config.errors import UserError
from megavis.training.metrics import read_metrics
from megavis.training.provenance import read_commands, read_faults, read_starts


def read_result(path: Path) -> Any:
    """Return the content of a JSON or CSV file, the latter as a list of rows by column."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [*csv.DictReader(text.splitlines())]


@dataclass(frozen=True)
class RunRecord:
    """One run: its `config.yaml`, empty if there is none, and the lines of its records.

    There is at least one line of metrics.
    """

    folder: Path
    config_text: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    faults: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read a run folder. Raises UserError if it has no metrics."""
        path = folder / "metrics.jsonl"
        if not path.exists():
            raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
        metrics = read_metrics(folder)
        if not metrics:
            raise UserError(f"{path} is empty: the run has not started")
        config = folder / "config.yaml"
        text = config.read_text(encoding="utf-8") if config.exists() else ""
        return cls(
            folder,
            config_text=text,
            config=yaml.safe_load(text) or {},
            metrics=metrics,
            starts=read_starts(folder),
            commands=read_commands(folder),
            faults=read_faults(folder),
        )

    @property
    def name(self) -> str:
        """Name of the run; that of its folder if it has no config."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def objective(self) -> str:
        """Name of the objective; empty if there is no config."""
        return str(self.setting("objective.name", ""))

    @property
    def is_finetuning(self) -> bool:
        """Whether the run fine-tunes a classifier."""
        return bool(self.config.get("finetune"))

    @property
    def dimensions_per_loss(self) -> int | None:
        """Dimensions over which the loss sums nats; None if it is no likelihood of images.

        Training has recorded what the objective declares. None for runs from before it did.
        """
        likelihood = self.starts[-1].get("likelihood") if self.starts else None
        return int(likelihood["per_loss"]) if likelihood else None

    @property
    def last_step(self) -> int:
        """Last logged optimizer step."""
        return int(self.metrics[-1]["step"])

    @functools.cached_property
    def manifest(self) -> CheckpointManifest | None:
        """Manifest of the newest checkpoint, if there is one that can be read."""
        try:
            checkpoint = latest_checkpoint(self.folder)
            return read_manifest(checkpoint) if checkpoint else None
        except (UserError, OSError):
            return None

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters in the newest checkpoint."""
        if self.manifest is None:
            return None
        weights = (t for name, t in self.manifest.tensors.items() if name.startswith("weight/"))
        return sum(math.prod(tensor.shape) for tensor in weights)

    @property
    def seconds_in_steps(self) -> float | None:
        """Time in training steps, from the logged throughput: no validation, saving or waiting."""
        seconds, seen = 0.0, 0.0
        for record in self.metrics:
            if "samples_seen" not in record:
                continue
            if record.get("samples_per_s"):
                seconds += (record["samples_seen"] - seen) / record["samples_per_s"]
            seen = record["samples_seen"]
        return seconds or None

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted key."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return default if node is None else node

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and the finite values of a logged metric."""
        points = [
            (record["step"], record[key])
            for record in self.metrics
            if isinstance(record.get(key), int | float) and math.isfinite(record[key])
        ]
        return [step for step, _ in points], [value for _, value in points]

    def median(self, key: str) -> float | None:
        """Return the median of a logged metric; None if it was never logged."""
        values = self.series(key)[1]
        return statistics.median(values) if values else None

    def results(self) -> Iterator[Path]:
        """Yield the files of `evaluation/` in order of name."""
        yield from sorted(path for path in self.folder.glob("evaluation/*") if path.is_file())

    def pictures(self) -> dict[str, Path]:
        """Return the newest picture of each kind in `samples/`, as `samples`, `completions`."""
        return {
            path.stem.partition("-")[0]: path for path in sorted(self.folder.glob("samples/*.png"))
        }
