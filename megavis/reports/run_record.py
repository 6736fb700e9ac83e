"""Read a run folder without torch: config, metrics, starts, results and pictures.

The results in `RUN/evaluation/` are also read as single metrics, each with its unit.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import CheckpointManifest, read_manifest
from megavis.config.errors import UserError
from megavis.config.yaml_tree import ConfigSource, read_tree
from megavis.evaluation.images.results import (
    BaselineAnswer,
    ClassesResult,
    CompletedImage,
    DepthResult,
    FilledHidden,
    FilledInGroups,
    PanopticResult,
    Quality,
    ReconstructionResult,
)
from megavis.evaluation.results import (
    FORMS,
    DetectionAccuracy,
    DetectionResult,
    FinetuneResult,
    LikelihoodResult,
    PixelAccuracy,
    PositionAccuracy,
    ProbeResult,
    SegmentationResult,
)
from megavis.training.metrics import read_metrics
from megavis.training.provenance import read_commands, read_faults, read_starts


def setting(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of a config by its dotted key; `default` if there is none, or it is null."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return default if node is None else node


@dataclass(frozen=True)
class RunRecord:
    """One run: its `config.yaml`, empty if there is none, and the lines of its records.

    There is at least one line of metrics. The name is the config's, or the folder's.
    """

    folder: Path
    name: str
    config_text: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    faults: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read a run folder. Raises UserError if it has no metrics, or its config is not YAML."""
        path = folder / "metrics.jsonl"
        if not path.exists() and (folder / "config.yaml").exists():
            raise UserError(
                f"{folder} has no metrics.jsonl, which training writes: a report is of a trained"
                " run, not of imported weights"
            )
        if not path.exists():
            raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
        metrics = read_metrics(folder)
        if not metrics:
            raise UserError(
                f"{path} is empty: training writes its first line after training.log_every steps,"
                " or at its first validation"
            )
        file, text, config = folder / "config.yaml", "", dict[str, Any]()
        if file.exists():
            # Not as a `RunConfig`: keys of earlier versions may be unknown today.
            text, config = file.read_text("utf-8"), read_tree(file, ConfigSource(str(file)))
        return cls(
            folder,
            name=str(config.get("name") or folder.resolve().name),
            config_text=text,
            config=config,
            metrics=metrics,
            starts=read_starts(folder),
            commands=read_commands(folder),
            faults=read_faults(folder),
        )

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
        return setting(self.config, key, default)

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

    @property
    def files(self) -> list[Path]:
        """The files of `evaluation/` in order of name."""
        return sorted(path for path in self.folder.glob("evaluation/*") if path.is_file())

    @functools.cached_property
    def results(self) -> tuple[dict[str, Any], dict[str, str]]:
        """See `read_results`."""
        return read_results(self.folder)

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


def read_results(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the evaluation files of a run folder that have a known form.

    Returns:
        A `Result` or a list of `Row` by file name, and by file name why another cannot be read.
    """
    found, refused = dict[str, Any](), dict[str, str]()
    for name, form in FORMS.items():
        path = folder / "evaluation" / name
        if path.exists():
            try:
                found[name] = form.read(path)
            except UserError as error:
                refused[name] = str(error)
    return found, refused


def eval_metrics(folder: Path) -> Iterator[EvalMetric]:
    """Yield the metrics in the evaluation files of a run folder, by command.

    Raises UserError if a file does not have the form that its command writes.
    """
    found, refused = read_results(folder)
    for reason in refused.values():
        raise UserError(reason)
    yield from metrics_of(found)


def metrics_of(found: Mapping[str, Any]) -> Iterator[EvalMetric]:
    """Yield the metrics of the results of `read_results`."""
    for name, measures in _MEASURES.items():
        if name in found:
            yield from measures(found[name])


def _probe(result: ProbeResult) -> Iterator[EvalMetric]:
    """Accuracy of the best layer, of an untrained network and of raw pixels."""
    share = functools.partial(_share, "linear probe", step=result.step)
    yield share("trained", result.best_layer.accuracy, f"layer {result.best_layer.layer}")
    if result.best_layer.vote_accuracy is not None:
        yield share("vote of masks", result.best_layer.vote_accuracy)
    yield share("untrained", result.untrained_accuracy)
    yield share("raw pixels", result.pixels.accuracy)


def _classes(result: FinetuneResult) -> Iterator[EvalMetric]:
    """Accuracy of fine-tuning on the test images."""
    found = result.accuracy
    note = f"of {found.num_images}"
    if isinstance(found, PixelAccuracy):
        yield _share("segments", "mIoU of crops", found.mean_iou, note, step=result.step)
    elif isinstance(found, DetectionAccuracy):
        yield from _objects(result)
    else:
        yield _share("classes", "test images", found.top1, note, step=result.step)


def _segments(result: SegmentationResult) -> Iterator[EvalMetric]:
    """Segmentation of whole images."""
    found = result.accuracy
    note = f"of {found.num_images}"
    yield _share("segments", "mIoU", found.mean_iou, note, step=result.step)
    yield _share("segments", "pixels", found.pixel_accuracy, note, step=result.step)


def _objects(result: FinetuneResult | DetectionResult) -> Iterator[EvalMetric]:
    found = result.accuracy
    assert isinstance(found, DetectionAccuracy)
    for name, numbers in (("box AP", found.box), ("mask AP", found.mask)):
        if numbers.ap is not None:
            note = f"of {found.num_images}"
            yield _share("instances", name, numbers.ap, note, step=result.step)


def _positions(rows: Sequence[PositionAccuracy]) -> Iterator[EvalMetric]:
    """Accuracy of positions: without a mask, with half masked, and by chance."""
    for row in rows:
        if row.mask_ratio in (0.0, 0.5):
            name = "half masked" if row.mask_ratio else "none masked"
            yield _share("in their place", name, row.accuracy)
    yield _share("in their place", "chance", rows[0].chance)


def _completions(rows: Sequence[CompletedImage]) -> Iterator[EvalMetric]:
    """PSNR over the pixels of all images, from the rows of single images."""
    values = {
        "one completion": [row.psnr_completed for row in rows],
        "mean of several": [row.psnr_mean_of_completions for row in rows],
        "row repeated": [row.psnr_last_row_repeated for row in rows],
    }
    for name, decibels in values.items():
        error = statistics.fmean(10 ** (-value / 10) for value in decibels)
        value = -10 * math.log10(error) if error else math.inf
        yield EvalMetric("lower halves", name, value, "dB")


def _groups(rows: Sequence[FilledInGroups]) -> Iterator[EvalMetric]:
    for row in rows:
        name = "all at once" if row.groups == 1 else f"{row.groups} groups"
        yield EvalMetric("what was hidden", name, row.scores.psnr, "dB")


def _hidden(rows: Sequence[FilledHidden]) -> Iterator[EvalMetric]:
    for row in rows:
        yield EvalMetric("hidden patches", row.hidden, row.scores.psnr, "dB")


def _reconstruction(result: ReconstructionResult) -> Iterator[EvalMetric]:
    yield EvalMetric("reconstruction", "PSNR", result.psnr, "dB", step=result.step)
    yield EvalMetric("reconstruction", "SSIM", result.ssim, "", step=result.step)


def _named(result: ClassesResult) -> Iterator[EvalMetric]:
    """Accuracy of a classifier on samples, reconstructions and real images."""
    parts = {"samples": result.samples, "reconstructions": result.reconstructions}
    for name, part in {**parts, "real images": result.real_images}.items():
        if part is not None:
            yield _share("named right", name, part.overall, f"of {part.images}")


def _likelihood(result: LikelihoodResult) -> Iterator[EvalMetric]:
    value = result.nats_per_dimension
    yield EvalMetric("likelihood", "per dimension", value, "nats", step=result.step)


def _panoptic(result: PanopticResult) -> Iterator[EvalMetric]:
    note = f"of {result.images} images"
    parts = {"all classes": result.overall, "things": result.things, "stuff": result.stuff}
    for name, part in parts.items():
        yield EvalMetric("panoptic quality", name, part.pq, "", note, result.step)


def _depth(result: DepthResult) -> Iterator[EvalMetric]:
    note = f"of {result.images} images"
    yield EvalMetric("depth", "RMSE", result.overall.rmse, "m", note, result.step)


def _baselines(answers: Sequence[BaselineAnswer]) -> Iterator[EvalMetric]:
    """Scores of what can be said of label maps without a model."""
    for each in answers:
        scores = each.scores
        value, unit = (scores.pq, "") if isinstance(scores, Quality) else (scores.rmse, "m")
        yield EvalMetric("without a model", each.answer, value, unit)


def _share(
    group: str, name: str, share: float, note: str = "", *, step: int | None = None
) -> EvalMetric:
    return EvalMetric(group, name, 100 * share, "%", note, step)


_MEASURES: dict[str, Callable[[Any], Iterator[EvalMetric]]] = {
    "probe.json": _probe,
    "finetune_test.json": _classes,
    "segmentation.json": _segments,
    "detection.json": _objects,
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
