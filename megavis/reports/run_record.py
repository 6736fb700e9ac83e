"""Read a run folder without torch: config, metrics, starts, results and pictures.

The results in `RUN/evaluation/` are also read as single metrics, each with its unit.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import CheckpointManifest, read_manifest
from megavis.config.errors import UserError
from megavis.data.format.files import from_json
from megavis.training.metrics import read_metrics
from megavis.training.provenance import read_commands, read_faults, read_starts


def read_result(path: Path) -> Any:
    """Return the content of a JSON or CSV file, the latter as a list of rows by column."""
    text = path.read_text(encoding="utf-8")
    return from_json(text) if path.suffix == ".json" else [*csv.DictReader(text.splitlines())]


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
        """Name of the run; its folder's name if it has no config."""
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
        """Dimensions over which the loss sums nats; None if it is not a likelihood of images.

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


@dataclass(frozen=True)
class EvalMetric:
    """One metric, in its unit: `%`, `dB`, `nats`, `m`, or none.

    Attributes:
        group: what was evaluated, for example `linear probe`.
        name: of the metric in its group, for example `trained`.
        note: further information, for example `layer 2`.
        step: of the evaluated checkpoint, if the file names it.
    """

    group: str
    name: str
    value: float
    unit: str
    note: str = ""
    step: int | None = None

    @property
    def formatted(self) -> str:
        """Value with unit: `34.4%`, `13.03 dB`."""
        return format_value(self.value, self.unit)


def format_value(value: float, unit: str) -> str:
    """Format a value with its unit."""
    return f"{value:.1f}%" if unit == "%" else f"{value:.2f} {unit}".strip()


def eval_metrics(folder: Path) -> Iterator[EvalMetric]:
    """Yield the metrics in the evaluation files of a run folder, by command.

    A file that is not in the format that its command writes is skipped; the page shows it in a
    section of its own.
    """
    for name, read in _READERS.items():
        path = folder / "evaluation" / name
        if path.exists():
            try:
                content = read_result(path)
                step = content.get("step") if isinstance(content, dict) else None
                found = [replace(measure, step=step) for measure in read(content)]
            except (LookupError, TypeError, ValueError, csv.Error):
                continue
            yield from found


def _probe(result: dict[str, Any]) -> Iterator[EvalMetric]:
    """Accuracy of the best layer, of an untrained network and of raw pixels."""
    group, best = "linear probe", result["best_layer"]
    yield _share(group, "trained", best["accuracy"], f"layer {best['layer']}")
    if best.get("vote_accuracy") is not None:
        yield _share(group, "vote of masks", best["vote_accuracy"])
    yield _share(group, "untrained", result["untrained_accuracy"])
    yield _share(group, "raw pixels", result["pixels"]["accuracy"])


def _classes(result: dict[str, Any]) -> Iterator[EvalMetric]:
    """Accuracy of fine-tuning on the test images."""
    yield _share("classes", "test images", result["top1"], f"of {result['num_images']}")


def _positions(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    """Accuracy of positions: without a mask, with half masked, and by chance."""
    accuracy = {float(row["mask_ratio"]): float(row["accuracy"]) for row in rows}
    group = "in their place"
    yield _share(group, "none masked", accuracy[0.0])
    yield _share(group, "half masked", accuracy[0.5])
    yield _share(group, "chance", float(rows[0]["chance"]))


def _completions(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    """PSNR over the pixels of all images, from the rows of single images."""
    names = {
        "completed": "one completion",
        "mean_of_completions": "mean of several",
        "last_row_repeated": "row repeated",
    }
    for key, name in names.items():
        errors = [10 ** (-float(row[f"psnr_{key}"]) / 10) for row in rows]
        yield EvalMetric("lower halves", name, -10 * math.log10(statistics.fmean(errors)), "dB")


def _groups(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    for row in rows:
        name = "all at once" if row["groups"] == "1" else f"{row['groups']} groups"
        yield EvalMetric("what was hidden", name, float(row["psnr"]), "dB")


def _hidden(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    for row in rows:
        yield EvalMetric("hidden patches", row["hidden"], float(row["psnr"]), "dB")


def _reconstruction(result: dict[str, Any]) -> Iterator[EvalMetric]:
    yield EvalMetric("reconstruction", "PSNR", result["psnr"], "dB")
    yield EvalMetric("reconstruction", "SSIM", result["ssim"], "")


def _named(result: dict[str, Any]) -> Iterator[EvalMetric]:
    """Accuracy of a classifier on samples, reconstructions and real images."""
    for name in ("samples", "reconstructions", "real images"):
        if name in result:
            part = result[name]
            yield _share("named right", name, part["all"], f"of {part['images']}")


def _likelihood(result: dict[str, Any]) -> Iterator[EvalMetric]:
    yield EvalMetric("likelihood", "per dimension", result["nats_per_dimension"], "nats")


def _panoptic(result: dict[str, Any]) -> Iterator[EvalMetric]:
    group, note = "panoptic quality", f"of {result['images']} images"
    for name, part in (("all classes", "all"), ("things", "things"), ("stuff", "stuff")):
        yield EvalMetric(group, name, result[part]["PQ"], "", note)


def _depth(result: dict[str, Any]) -> Iterator[EvalMetric]:
    note = f"of {result['images']} images"
    yield EvalMetric("depth", "RMSE", result["all"]["RMSE"], "m", note)


def _baselines(answers: list[dict[str, Any]]) -> Iterator[EvalMetric]:
    """Scores of what can be said of label maps without a model."""
    for answer in answers:
        is_depth = "RMSE" in answer
        value = answer["RMSE" if is_depth else "PQ"]
        yield EvalMetric("without a model", answer["answer"], value, "m" if is_depth else "")


def _share(group: str, name: str, share: float, note: str = "") -> EvalMetric:
    return EvalMetric(group, name, 100 * share, "%", note)


_READERS: dict[str, Callable[[Any], Iterator[EvalMetric]]] = {
    "probe.json": _probe,
    "finetune_test.json": _classes,
    "positions.csv": _positions,
    "completions.csv": _completions,
    "groups.csv": _groups,
    "reconstructions.csv": _hidden,
    "reconstruction.json": _reconstruction,
    "classes.json": _named,
    "likelihood.json": _likelihood,
    "panoptic.json": _panoptic,
    "depth_errors.json": _depth,
    "label_map_baselines.json": _baselines,
}
