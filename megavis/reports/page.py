"""Render runs as a page, and compare them with published results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from markupsafe import Markup

from megavis.evaluation.published import PublishedPaper, PublishedTable, published_papers
from megavis.reports.blocks import (
    NUM_COLORS,
    Block,
    PageSection,
    Picture,
    Table,
    number,
    percent,
    picture,
    text,
    words,
)
from megavis.reports.results import first_sections, metrics_table, probed_shards, result_sections
from megavis.reports.run_record import RunRecord, read_result
from megavis.reports.training_sections import events_table, headline, overview, training_charts
from megavis.training.provenance import versions

_PICTURES = {
    "completions": "Completions: the original, the given part, generated completions",
    "samples": "Samples",
    "step": "Samples during training",
    "watch": "Samples by checkpoint",
}
"""Titles of the pictures in `samples/` by kind, in page order."""


@dataclass(frozen=True)
class RunPage:
    """The page of one run.

    Attributes:
        name: name of the run.
        folder: path of its folder.
        color: index of its colour.
        paper: title of the paper, or the objective's name.
        facts: pairs of name and text.
        glance: the first screen: completions or samples, the probe, and the paper's main result.
        pictures: the newest picture of each other kind.
        sections: other evaluations.
        commands: commands to reproduce it, in groups with a label.
        config: full text of `config.yaml`.
        environment: package names and versions.
    """

    name: str
    folder: str
    color: int
    paper: str
    facts: Sequence[tuple[str, str]]
    glance: Sequence[Block]
    pictures: Sequence[Picture]
    sections: Sequence[PageSection]
    commands: Sequence[tuple[str, Sequence[str]]]
    config: str
    environment: Mapping[str, str]


def render(runs: Sequence[RunRecord]) -> str:
    """Render one or several runs as an HTML page. Raises OSError if a file cannot be read."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megavis.reports", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("megavis.reports").joinpath("page.css").read_text(encoding="utf-8")
    names = [run.name for run in runs]
    return environment.get_template("page.html.jinja").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=versions().get("megavis", ""),
        style=Markup(style),  # noqa: S704 - our own file
        runs=[_run_page(number, run) for number, run in enumerate(runs)],
        overview=overview(runs),
        charts=list(training_charts(runs)),
        events=events_table(runs),
        comparisons=list(compare(runs)),
        here=versions(),
    )


def _run_page(number: int, run: RunRecord) -> RunPage:
    paper = published_papers().get(run.objective)
    last = run.starts[-1] if run.starts else {}
    known = ("device", "processes", "machine")
    environment: dict[str, str] = {key: text(last[key]) for key in known if key in last}
    pictures = _pictures(run)
    found = [block for section in first_sections(run) for block in section.blocks]
    return RunPage(
        name=run.name,
        folder=str(run.folder),
        color=number % NUM_COLORS,
        paper=paper.title if paper else words(run.objective),
        facts=headline(run),
        glance=[*pictures[:1], *metrics_table(run), *found],
        pictures=pictures[1:],
        sections=list(result_sections(run)),
        commands=list(_commands(run)),
        config=run.config_text,
        environment={**environment, **last.get("versions", {})},
    )


def _pictures(run: RunRecord) -> Sequence[Picture]:
    shown = []
    found = run.pictures()
    for kind in sorted(found, key=[*_PICTURES, *found].index):
        path = found[kind]
        title = _PICTURES.get(kind, words(kind))
        step = path.stem.rpartition("-")[2]
        caption = f"{title}. Step {int(step)}, {path.name}." if step.isdigit() else f"{title}."
        try:
            shown.append(picture(path, title="", caption=caption))
        except ValueError:
            continue  # not a PNG, or truncated
    return shown


def _commands(run: RunRecord) -> Iterator[tuple[str, Sequence[str]]]:
    verb = "finetune" if run.is_finetuning else "train"
    if started := [start["command"] for start in run.starts if "command" in start]:
        yield "Training as started", list(dict.fromkeys(started))
    if run.config_text:
        config = str(run.folder / "config.yaml")
        again = shlex.join(["megavis", verb, config, f"name={run.name}_again"])
        yield "Training from the resolved config", [again]
    if run.commands:
        done = [record["command"] for record in run.commands if "command" in record]
        yield "Evaluation and export", list(dict.fromkeys(done))


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
    for path in run.results():
        find = _FINDERS.get(path.name)
        if find is None:
            continue
        try:
            yield from list(find(run, read_result(path)))
        except (KeyError, TypeError, ValueError):
            continue  # the file's own section shows its content


def _probe(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    images = f"{result['num_validation']} of {probed_shards(run, result) or 'validation'}"
    best = result["best_layer"]
    what = f"linear probe, layer {best['layer']}, step {result['step']}"
    yield RunResult("linear_probe", run.name, what, images, percent(best["accuracy"]))
    for score in result.get("low_data") or ():
        if score["features"] == "trained":
            what = f"{score['images_per_class']} labels per class, {len(score['accuracies'])} draws"
            error = f"{100 * (1 - score['mean']):.1f} ± {100 * score['deviation']:.1f} % error"
            yield RunResult("low_data", run.name, what, images, error)


def _finetune(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    images = f"{result['num_images']} of {result['data']} (test)"
    what = f"fine-tuned, step {result['step']}"
    yield RunResult("finetune", run.name, what, images, percent(result["vote"]))


def _samples(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    reference = result["reference"]["source"]
    images = f"{result['samples']['num_images']} against {reference}"
    for key, name in (("fid", "FID"), ("frechet_distance", result["title"])):
        if key in result:
            yield RunResult("generation", run.name, name, images, number(result[key]))


def _transfer(run: RunRecord, rows: list[dict[str, str]]) -> Iterator[RunResult]:
    for row in rows:
        # Older tables do not have the column.
        if row["labels"] == "all" and row.get("features", "trained") == "trained":
            what = f"linear probe on {row['data_set']}, layer {row['layer']}"
            images = f"{row['num_test']} of {row['test']}"
            yield RunResult("transfer", run.name, what, images, percent(float(row["accuracy"])))


def _likelihood(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    images = f"{result['num_images']} of {result['data']}"
    value = f"{result['nats_per_dimension']:.4f} nats per dimension ({result['dimension']})"
    yield RunResult("likelihood", run.name, f"likelihood, step {result['step']}", images, value)


def _panoptic(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    images, quality = f"{result['images']} of {result['of']}", f"{result['all']['PQ']:.1f} PQ"
    what = f"panoptic quality, step {result['step']}"
    yield RunResult("dense_prediction", run.name, what, images, quality)


def _depth(run: RunRecord, result: dict[str, Any]) -> Iterator[RunResult]:
    images, error = f"{result['images']} of {result['of']}", f"{result['all']['RMSE']:.3f} m RMSE"
    yield RunResult("dense_prediction", run.name, f"depth, step {result['step']}", images, error)


_FINDERS: dict[str, Callable[[RunRecord, Any], Iterator[RunResult]]] = {
    "probe.json": _probe,
    "transfer.csv": _transfer,
    "finetune_test.json": _finetune,
    "samples.json": _samples,
    "likelihood.json": _likelihood,
    "panoptic.json": _panoptic,
    "depth_errors.json": _depth,
}
