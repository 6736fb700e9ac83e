"""Render runs as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from markupsafe import Markup

from megavis.evaluation.published import published_papers
from megavis.reports.blocks import Block, PageSection, Picture, picture, text, words
from megavis.reports.charts import NUM_COLORS
from megavis.reports.published_comparison import compare
from megavis.reports.results import first_sections, numbers_found, result_sections
from megavis.reports.run_record import RunRecord
from megavis.reports.training_sections import (
    events_table,
    headline,
    overview,
    training_charts,
)
from megavis.training.provenance import versions

_PICTURES = {
    "completions": "Completions: the original, what was given, what the run draws",
    "samples": "Samples",
    "step": "Drawn while training",
    "watch": "Generated during training",
}
"""What each kind of picture in `samples/` is, in the order of the page."""


@dataclass(frozen=True)
class RunPage:
    """The page of one run.

    Attributes:
        name: of the run.
        folder: its path.
        color: number of its colour.
        paper: title of the paper, or the objective's name.
        facts: names and texts.
        glance: the first screen: completions or samples, the probe, what shows the paper's task.
        pictures: the newest of each other kind.
        sections: its other evaluations.
        commands: what to type to repeat it, each group with a label.
        config: `config.yaml`, whole.
        environment: names and versions.
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
    """Return the page of one run or several, as HTML.

    Raises:
        OSError: a file of a run cannot be read.
    """
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
        glance=[*pictures[:1], *numbers_found(run), *found],
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
            continue  # Not a PNG, or torn: nothing to show.
    return shown


def _commands(run: RunRecord) -> Iterator[tuple[str, Sequence[str]]]:
    verb = "finetune" if run.is_finetuning else "train"
    if started := [start["command"] for start in run.starts if "command" in start]:
        yield "As it was started", list(dict.fromkeys(started))
    if run.config_text:
        config = str(run.folder / "config.yaml")
        again = shlex.join(["megavis", verb, config, f"name={run.name}_again"])
        yield "The same from its resolved config", [again]
    if run.commands:
        done = [record["command"] for record in run.commands if "command" in record]
        yield "What was made of it", list(dict.fromkeys(done))
