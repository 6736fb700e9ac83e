"""Render runs as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from markupsafe import Markup

from megavis.evaluation.published import published_papers
from megavis.reports.blocks import NUM_COLORS, Block, PageSection, Picture, picture, text, words
from megavis.reports.published_comparison import compare
from megavis.reports.results import first_sections, metrics_table, result_sections
from megavis.reports.run_record import RunRecord
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
