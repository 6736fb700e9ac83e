"""Files of `RUN/evaluation/`, read without torch: as numbers, and as sections of a page.

Nothing is left out: JSON that `known_results.py` does not know becomes a table of what it holds.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megavis.reports.blocks import (
    Block,
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
from megavis.reports.charts import Chart
from megavis.reports.known_results import KNOWN_RESULTS
from megavis.reports.run_record import RunRecord
from megavis.training.metrics import read_json_lines

_SHOWN = (".json", ".jsonl", ".csv", ".md", ".png")
_FIGURES = {
    "attention": "Where each head looks",
    "completions": "Lower halves from upper ones",
    "correlation": "How alike tokens are over their distance",
    "depth": "Linear probe by layer",
    "groups": "Hidden patches, group by group",
    "jigsaw": "Images put together from predicted places",
    "likelihood": "Accuracy over validation loss",
    "mixture": "Patches of two images, put back",
    "neighbors": "Nearest neighbours by layer",
    "patches": "Prediction error by place",
    "positions": "Patches put into their place, over the mask ratio",
    "reconstructions": "Hidden patches predicted from the visible ones",
}
_HEADINGS = {
    "probe": "Linear probe",
    "finetune_selection": "Fine-tuning: the images that chose the step",
    "finetune_test": "Fine-tuning: the images that judge",
    "likelihood": "Likelihood",
    "samples": "Generated images",
    "transfer": "Linear probes on other data sets",
    "watch": "Checkpoints as they appeared",
}
_FIRST = ("probe", "completions", "jigsaw", "groups", "reconstructions")


def numbers_found(run: RunRecord) -> Iterator[Table]:
    """Yield a table of what evaluation has measured; the probe is shown in its own way."""
    try:
        found = [measure for measure in eval_metrics(run.folder) if measure.of != "linear probe"]
    except (KeyError, TypeError, ValueError):
        return  # Not of the form that the commands write: each is shown by itself.
    rows = [(f"{each.of}, {each.name}", f"{each.written} {each.note}".strip()) for each in found]
    if rows:
        yield Table("In numbers", ("", "value"), rows)


def first_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the main results: the probe, and predictions of held-out images."""
    return _sections(run, lambda stem: stem in _FIRST)


def result_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the other sections, in the order of the page, and the names of other files."""
    yield from _sections(run, lambda stem: stem not in _FIRST)
    others = [path for path in run.results() if path.suffix not in _SHOWN]
    if others:
        rows = [(path.name, number(path.stat().st_size)) for path in others]
        yield PageSection(
            "Other files", [Table("", ("file", "bytes"), rows, str(others[0].parent))]
        )


def _sections(run: RunRecord, shows: Callable[[str], bool]) -> Iterator[PageSection]:
    """Yield a section for each name in `evaluation/`: its JSON, its CSV and its picture."""
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
        # Where the section has the name of something else.
        title = _FIGURES.get(stem, "") if stem in _HEADINGS else ""
        yield picture(files[".png"], title=title, on_white=True)
    if ".csv" in files:
        yield csv_table(files[".csv"], title="The numbers")


def _known_blocks(stem: str, run: RunRecord, content: Any) -> list[Block]:
    """Return what a known file is shown as; nothing where it is not of the form that is known."""
    try:
        return list(KNOWN_RESULTS[stem](run, content)) if stem in KNOWN_RESULTS else []
    except (KeyError, TypeError, IndexError, ValueError):
        return []


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
