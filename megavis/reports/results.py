"""Read the files of `RUN/evaluation/` without torch, as metrics and as sections of a page.

JSON files that `known_results.py` does not know are shown as tables.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megavis.reports.blocks import (
    Block,
    Chart,
    Confusion,
    PageSection,
    Table,
    csv_table,
    markdown_table,
    number,
    picture,
    tables_of,
    words,
)
from megavis.reports.known_results import KNOWN_RESULTS
from megavis.reports.run_record import RunRecord, read_result
from megavis.training.metrics import read_json_lines

_SHOWN = (".json", ".jsonl", ".csv", ".md", ".png")
_FIGURES = {
    "attention": "Attention by head",
    "completions": "Lower halves from upper ones",
    "correlation": "Similarity of tokens by distance",
    "depth": "Linear probe by layer",
    "groups": "Hidden patches, group by group",
    "jigsaw": "Images reassembled from predicted positions",
    "likelihood": "Accuracy over validation loss",
    "mixture": "Mixed patches of two images, reassembled",
    "neighbors": "Nearest neighbours by layer",
    "patches": "Prediction error by position",
    "positions": "Accuracy of predicted positions by mask ratio",
    "reconstructions": "Hidden patches predicted from the visible ones",
}
_HEADINGS = {
    "probe": "Linear probe",
    "finetune_selection": "Fine-tuning: selection images",
    "finetune_test": "Fine-tuning: test images",
    "likelihood": "Likelihood",
    "samples": "Generated images",
    "transfer": "Linear probes on other data sets",
    "watch": "Checkpoints during training",
}
_FIRST = ("probe", "completions", "jigsaw", "groups", "reconstructions")


def metrics_table(run: RunRecord) -> Iterator[Table]:
    """Yield a table of all metrics except the probe's, which has a section of its own."""
    found = [measure for measure in eval_metrics(run.folder) if measure.group != "linear probe"]
    rows = [(f"{m.group}, {m.name}", f"{m.formatted} {m.note}".strip()) for m in found]
    if rows:
        yield Table("Metrics", ("", "value"), rows)


def first_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the main results: the probe and predictions of held-out images."""
    return _sections(run, lambda stem: stem in _FIRST)


def result_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the other sections in page order, and a list of other files."""
    yield from _sections(run, lambda stem: stem not in _FIRST)
    others = [path for path in run.results() if path.suffix not in _SHOWN]
    if others:
        rows = [(path.name, number(path.stat().st_size)) for path in others]
        yield PageSection(
            "Other files", [Table("", ("file", "bytes"), rows, str(others[0].parent))]
        )


def _sections(run: RunRecord, shows: Callable[[str], bool]) -> Iterator[PageSection]:
    """Yield a section for each name in `evaluation/`: JSON, CSV and picture."""
    files: dict[str, dict[str, Path]] = {}
    for path in run.results():
        if shows(path.stem):
            files.setdefault(path.stem, {})[path.suffix] = path
    for stem in sorted(files, key=lambda stem: ([*KNOWN_RESULTS, stem].index(stem), stem)):
        by_suffix = files[stem]
        try:
            blocks: Sequence[Block] = [*_blocks(run, stem, by_suffix)]
        except (ValueError, csv.Error) as error:
            blocks = [Table("", ("cannot be read",), [(str(error),)])]
        if blocks:
            yield PageSection(_heading(stem), blocks)


def _heading(stem: str) -> str:
    if stem in _HEADINGS:
        return _HEADINGS[stem]
    heading = words(_FIGURES.get(stem, stem)).replace("-", " ")
    return heading[:1].upper() + heading[1:]


def _blocks(run: RunRecord, stem: str, files: dict[str, Path]) -> Iterator[Block]:
    drawn = False
    if ".json" in files:
        content = json.loads(files[".json"].read_text(encoding="utf-8"))
        blocks = _known_blocks(stem, run, content) or tables_of(content, title="")
        drawn = any(isinstance(block, Chart | Confusion) for block in blocks)
        yield from blocks
    if ".jsonl" in files:
        records = read_json_lines(files[".jsonl"])
        yield from _known_blocks(stem, run, records) or tables_of(records, title="")
    if ".md" in files:
        yield markdown_table(files[".md"])
    if ".png" in files and not drawn:
        # The section is named after another file.
        title = _FIGURES.get(stem, "") if stem in _HEADINGS else ""
        yield picture(files[".png"], title=title, on_white=True)
    if ".csv" in files:
        yield csv_table(files[".csv"])


def _known_blocks(stem: str, run: RunRecord, content: Any) -> list[Block]:
    """Return the blocks of a known file; none if it is unknown or has another format."""
    try:
        return list(KNOWN_RESULTS[stem](run, content)) if stem in KNOWN_RESULTS else []
    except (KeyError, TypeError, IndexError, ValueError):
        return []


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
