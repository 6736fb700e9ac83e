"""Published results of the papers, from `published/<paper>.yaml`, and runs compared with them.

A table has its number in the paper, a title, measure and data set, columns, and rows as printed.
Numbers stay text, so that 78.0 stays 78.0. Results of dense prediction, of reconstructed and of
predicted maps, take its form: the paper's rows come first, then the run's, whose data are named
below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from megavis.evaluation.figures import markdown_table
from megavis.evaluation.images.results import DepthResult, PanopticResult, SamplesResult
from megavis.evaluation.results import (
    ClassAccuracy,
    DetectionResult,
    FinetuneResult,
    LikelihoodResult,
    ProbeResult,
    SegmentationResult,
    TransferRow,
)
from megavis.reports.blocks import Table, number, percent
from megavis.reports.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        table: its name in the paper, for example `Table 2`.
        measure: kind of evaluation: `linear_probe`, `low_data`, `finetune`, `generation`,
            `transfer`, `classification` (linear probe and fine-tuning) and others.
        dataset: of all rows; empty if it is a column.
        metric: name and unit of the values.
        rows: of c cells each, digits as printed; empty cells as in the paper.
    """

    table: str
    title: str
    measure: str
    dataset: str = ""
    metric: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PublishedPaper:
    """The tables of one paper.

    Attributes:
        short: its short name, which occurs in the rows of its own models.
        tables: in the paper's order.
    """

    title: str
    short: str
    tables: tuple[PublishedTable, ...]


_TABLES = TypeAdapter(tuple[PublishedTable, ...])


@functools.cache
def published_papers() -> Mapping[str, PublishedPaper]:
    """Return the papers with published results by name of their objective."""
    folder = resources.files("megavis.reports") / "published"
    papers: dict[str, PublishedPaper] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        written = file.read_text(encoding="utf-8")
        tree = yaml.load(written, Loader=yaml.BaseLoader)  # noqa: S506 - keeps all scalars as text
        tables = _TABLES.validate_python(tree["tables"])
        papers |= dict.fromkeys(
            tree["objectives"], PublishedPaper(tree["paper"], tree["short"], tables)
        )
    return papers


STAGES = ("recon.", "inference")
"""What a column of dense prediction names after the metric."""


def dense_table(objective: str) -> PublishedTable | None:
    """Return the table of dense prediction in the paper of an objective; None without one."""
    paper = published_papers().get(objective)
    tables = paper.tables if paper else ()
    return next((table for table in tables if table.measure == "dense_prediction"), None)


def reconstruction_of(
    tokenizer: Path, file: str, result: PanopticResult | DepthResult
) -> PanopticResult | DepthResult | None:
    """Return the errors of a run's tokenizer, if it was evaluated on the same images.

    Args:
        tokenizer: run folder of the autoencoder.
        file: name of its evaluation's file.
        result: of the run that has this tokenizer.

    Raises:
        UserError: the file has another form.
    """
    path = tokenizer / "evaluation" / file
    if not path.exists():
        return None
    found = type(result).read(path)
    return found if (found.of, found.images) == (result.of, result.images) else None


def markdown_of(
    table: PublishedTable, name: str, values: Mapping[str, float], *, images: str
) -> str:
    """Return a paper's table with a further row, of a run.

    Args:
        values: by column; others are empty. They have as many decimals as the paper's.
        images: number and folder of the run's images.
    """
    digits = {
        column: len(printed.partition(".")[2])
        for column, printed in zip(table.columns, table.rows[-1], strict=True)
    }
    own = [f"{values[c]:.{digits[c]}f}" if c in values else "" for c in table.columns[1:]]
    lines = (
        f"# {table.table}: {table.title}",
        "",
        *markdown_table(table.columns, [*table.rows, (name, *own)]),
        "",
        f"Rows above {name} are the paper's: {table.dataset}.",
        f"That of {name} is of {images}: other data, unless these are the same images.",
    )
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class RunResult:
    """A result of a run that is comparable with the tables of a paper with this measure."""

    measure: str
    run: str
    what: str
    images: str
    value: str


@dataclass(frozen=True)
class PaperComparison:
    """The runs' comparable results, if any, and a paper's tables: of the same measures, others."""

    title: str
    own: Table | None
    compared: Sequence[Table]
    others: Sequence[Table]


_SAME_MEASURE = {
    "linear_probe": {"linear_probe", "classification"},
    "low_data": {"low_data"},
    "finetune": {"finetune", "classification"},
    "segmentation": {"segmentation"},
    "detection": {"detection"},
    "generation": {"generation"},
    "transfer": {"transfer", "linear_probe"},
    "likelihood": {"likelihood"},
    "dense_prediction": {"dense_prediction"},
}
"""Measures of the tables to show with each result."""


def compare(runs: Sequence[RunRecord]) -> Iterator[PaperComparison]:
    """Yield a comparison for each paper of the runs."""
    papers = published_papers()
    by_title: dict[str, tuple[PublishedPaper, list[RunRecord]]] = {}
    for run in runs:
        if paper := papers.get(run.objective):
            by_title.setdefault(paper.title, (paper, []))[1].append(run)
    for paper, own_runs in by_title.values():
        results = [result for run in own_runs for result in run_results(run)]
        measures = set().union(*(_SAME_MEASURE[result.measure] for result in results))
        compared = [table for table in paper.tables if table.measure in measures]
        others = [table for table in paper.tables if table.measure not in measures]
        yield PaperComparison(
            paper.title,
            _own_table(results) if results else None,
            [_table(table, paper) for table in compared],
            [_table(table, paper) for table in others],
        )


def _own_table(results: Sequence[RunResult]) -> Table:
    rows = [(result.run, result.what, result.images, result.value) for result in results]
    caption = "Comparable with the paper's only where data, model size and recipe are the same."
    title = "This run" if len({result.run for result in results}) == 1 else "These runs"
    return Table(title, ("run", "", "images", "value"), rows, caption)


def _table(table: PublishedTable, paper: PublishedPaper) -> Table:
    own = {
        place for place, row in enumerate(table.rows) if any(paper.short in cell for cell in row)
    }
    where = f" {table.dataset}." if table.dataset else ""
    return Table(
        f"{table.table}: {table.title}",
        table.columns,
        table.rows,
        f"{table.metric[:1].upper()}{table.metric[1:]}.{where}",
        marked=frozenset(own) if len(own) < len(table.rows) else frozenset(),
    )


def run_results(run: RunRecord) -> Iterator[RunResult]:
    """Yield what a run's evaluation has found, as far as papers have a table of it."""
    for name, result in run.results[0].items():
        if find := _FINDERS.get(name):
            yield from find(run, result)


def _probe(run: RunRecord, result: ProbeResult) -> Iterator[RunResult]:
    images = f"{result.num_validation} of {result.splits['validation']}"
    what = f"linear probe, layer {result.best_layer.layer}, step {result.step}"
    yield RunResult("linear_probe", run.name, what, images, percent(result.best_layer.accuracy))
    for score in result.low_data:
        if score.features == "trained":
            what = f"{score.images_per_class} labels per class, {len(score.accuracies)} draws"
            error = f"{100 * (1 - score.mean):.1f} ± {100 * score.deviation:.1f} % error"
            yield RunResult("low_data", run.name, what, images, error)


def _finetune(run: RunRecord, result: FinetuneResult) -> Iterator[RunResult]:
    images = f"{result.accuracy.num_images} of {result.data} (test)"
    what = f"fine-tuned, step {result.step}"
    if isinstance(result.accuracy, ClassAccuracy):
        yield RunResult("finetune", run.name, what, images, percent(result.accuracy.vote))


def _segmentation(run: RunRecord, result: SegmentationResult) -> Iterator[RunResult]:
    images = f"{result.accuracy.num_images} of {result.data}"
    what = f"fine-tuned, step {result.step}, mIoU"
    yield RunResult("segmentation", run.name, what, images, percent(result.accuracy.mean_iou))


def _detection(run: RunRecord, result: DetectionResult) -> Iterator[RunResult]:
    images = f"{result.accuracy.num_images} of {result.data}"
    parts = {"box": result.accuracy.box, "mask": result.accuracy.mask}
    for name, numbers in parts.items():
        if numbers.ap is not None:
            what = f"fine-tuned, step {result.step}, {name} AP"
            yield RunResult("detection", run.name, what, images, percent(numbers.ap))


def _samples(run: RunRecord, result: SamplesResult) -> Iterator[RunResult]:
    images = f"{result.samples.num_images} against {result.reference.source}"
    yield RunResult("generation", run.name, result.title, images, number(result.distance))


def _transfer(run: RunRecord, rows: Sequence[TransferRow]) -> Iterator[RunResult]:
    for row in rows:
        if row.score.labels == "all" and row.features == "trained":
            what = f"linear probe on {row.data_set}, layer {row.score.layer}"
            images = f"{row.num_test} of {row.test}"
            yield RunResult("transfer", run.name, what, images, percent(row.score.accuracy))


def _likelihood(run: RunRecord, result: LikelihoodResult) -> Iterator[RunResult]:
    images = f"{result.num_images} of {result.data}"
    value = f"{result.nats_per_dimension:.4f} nats per dimension ({result.dimension})"
    yield RunResult("likelihood", run.name, f"likelihood, step {result.step}", images, value)


def _panoptic(run: RunRecord, result: PanopticResult) -> Iterator[RunResult]:
    images, quality = f"{result.images} of {result.of}", f"{result.value:.1f} PQ"
    what = f"panoptic quality, step {result.step}"
    yield RunResult("dense_prediction", run.name, what, images, quality)


def _depth(run: RunRecord, result: DepthResult) -> Iterator[RunResult]:
    images, error = f"{result.images} of {result.of}", f"{result.value:.3f} m RMSE"
    yield RunResult("dense_prediction", run.name, f"depth, step {result.step}", images, error)


_FINDERS: dict[str, Callable[[RunRecord, Any], Iterator[RunResult]]] = {
    "probe.json": _probe,
    "transfer.csv": _transfer,
    "finetune_test.json": _finetune,
    "segmentation.json": _segmentation,
    "detection.json": _detection,
    "samples.json": _samples,
    "likelihood.json": _likelihood,
    "panoptic.json": _panoptic,
    "depth_errors.json": _depth,
}
