"""Results of a run as numbers, read from `evaluation/` without torch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class EvalMetric:
    """One number.

    Attributes:
        of: what was measured, `linear probe`.
        name: which number of it, `trained`.
        value: in `unit`.
        unit: `%`, `dB`, `nats`, or nothing.
        note: what else to know of it, `layer 2`.
    """

    of: str
    name: str
    value: float
    unit: str
    note: str = ""

    @property
    def written(self) -> str:
        """The number with its unit: `34.4%`, `13.03 dB`."""
        return spelled(self.value, self.unit)


def spelled(value: float, unit: str) -> str:
    """Return a number with its unit, with as many digits as are worth reading."""
    return f"{value:.1f}%" if unit == "%" else f"{value:.2f} {unit}".strip()


def eval_metrics(folder: Path) -> Iterator[EvalMetric]:
    """Yield what the evaluation of a run folder has found, by the command that measured it.

    Raises:
        KeyError, ValueError: a file is not of the form that its command writes.
    """
    for name, read in _READERS.items():
        path = folder / "evaluation" / name
        if path.exists():
            text = path.read_text(encoding="utf-8")
            rows = (
                json.loads(text) if path.suffix == ".json" else [*csv.DictReader(text.splitlines())]
            )
            yield from read(rows)


def _probe(result: dict[str, Any]) -> Iterator[EvalMetric]:
    """The trained network's best layer, an untrained one's, and raw pixels."""
    of, best = "linear probe", result["best_layer"]
    yield _share(of, "trained", best["accuracy"], f"layer {best['layer']}")
    if best.get("vote_accuracy") is not None:
        yield _share(of, "vote of masks", best["vote_accuracy"])
    yield _share(of, "untrained", result["untrained_accuracy"])
    yield _share(of, "raw pixels", result["pixels"]["accuracy"])


def _classes(result: dict[str, Any]) -> Iterator[EvalMetric]:
    """Fine-tuning, on the images that chose nothing."""
    yield _share("classes", "test images", result["top1"], f"of {result['num_images']}")


def _positions(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    """Patches in their place: all of them seen, half of them, and by chance."""
    accuracy = {float(row["mask_ratio"]): float(row["accuracy"]) for row in rows}
    of = "in their place"
    yield _share(of, "none masked", accuracy[0.0])
    yield _share(of, "half masked", accuracy[0.5])
    yield _share(of, "chance", float(rows[0]["chance"]))


def _completions(rows: list[dict[str, str]]) -> Iterator[EvalMetric]:
    """PSNR over the pixels of all images, which the rows have image by image."""
    names = {
        "completed": "one completion",
        "mean_of_completions": "mean of several",
        "last_row_repeated": "row repeated",
    }
    for key, name in names.items():
        errors = [10 ** (-float(row[f"psnr_{key}"]) / 10) for row in rows]
        yield EvalMetric("lower halves", name, -10 * math.log10(fmean(errors)), "dB")


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
    """How often samples, reconstructions and real images are named as their class."""
    for name in ("samples", "reconstructions", "real images"):
        if name in result:
            part = result[name]
            yield _share("named right", name, part["all"], f"of {part['images']}")


def _likelihood(result: dict[str, Any]) -> Iterator[EvalMetric]:
    yield EvalMetric("likelihood", "a dimension", result["nats_per_dimension"], "nats")


def _share(of: str, name: str, share: float, note: str = "") -> EvalMetric:
    return EvalMetric(of, name, 100 * share, "%", note)


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
}
