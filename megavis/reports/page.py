"""Render runs as a page: facts, curves and events of several runs, and the results of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from markupsafe import Markup

from megavis.config.errors import counted
from megavis.reports.blocks import (
    NUM_COLORS,
    Block,
    Chart,
    Line,
    PageSection,
    Picture,
    Table,
    line_chart,
    number,
    picture,
    text,
    words,
)
from megavis.reports.published import compare, published_papers
from megavis.reports.results import first_sections, metrics_table, result_sections
from megavis.reports.run_record import RunRecord
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
    """Render one or several runs as an HTML page. Raises OSError if a file cannot be read.

    Runs that have a name in common are called by their folders.
    """
    import jinja2

    counts = Counter(run.name for run in runs)
    runs = [
        dataclasses.replace(run, name=str(run.folder)) if counts[run.name] > 1 else run
        for run in runs
    ]
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
        name = run.setting("name", run.folder.name)
        again = shlex.join(["megavis", verb, config, f"name={name}_again"])
        yield "Training from the resolved config", [again]
    if run.commands:
        done = [record["command"] for record in run.commands if "command" in record]
        yield "Evaluation and export", list(dict.fromkeys(done))


Colored = Sequence[tuple[int, str, RunRecord]]
"""Runs with their colour index and their legend, which is empty for a single run."""


def headline(run: RunRecord) -> list[tuple[str, str]]:
    """Return the main facts of a run as pairs of name and text."""
    facts: list[tuple[str, str | None]] = [
        ("model", _model(run)),
        ("parameters", None if run.num_parameters is None else _millions(run.num_parameters)),
        ("data", _data(run)),
        ("step", f"{run.last_step} of {run.setting('training.steps', '–')}"),
        ("images seen", _images_seen(run)),
        ("layout", _layout(run)),
        ("speed", _speed(run)),
        ("time in steps", _duration(run.seconds_in_steps)),
        ("checks", _guards(run)),
        *_losses(run),
    ]
    return [(name, value) for name, value in facts if value]


def overview(runs: Sequence[RunRecord]) -> Table:
    """Return the facts of several runs side by side."""
    facts = [dict(headline(run)) for run in runs]
    names = list(dict.fromkeys(name for one in facts for name in one))
    rows = [(name, *(one.get(name, "–") for one in facts)) for name in names]
    return Table("", ("", *(run.name for run in runs)), rows)


def _model(run: RunRecord) -> str | None:
    if not run.setting("model"):
        return None
    names = {"num_layers": "layers", "hidden_size": "wide", "num_attention_heads": "heads"}
    return ", ".join(f"{run.setting(f'model.{key}')} {name}" for key, name in names.items())


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _data(run: RunRecord) -> str | None:
    train = run.setting("data.train")
    if isinstance(train, list):
        train = ", ".join(str(part.get("path")) for part in train)
    size = run.setting("data.image_size")
    return f"{train}, {size} × {size}" if train and size else train


def _images_seen(run: RunRecord) -> str | None:
    seen, batch = run.series("samples_seen")[1], run.setting("training.batch_size")
    return f"{number(seen[-1])}, {batch} per step" if seen else None


def _layout(run: RunRecord) -> str | None:
    precision, zero = run.setting("training.precision", ""), run.setting("parallel.zero_stage", 0)
    if run.manifest is None:
        return precision or None
    axes = ("tensor", "context", "pipeline", "data")
    sizes = {axis: _size(run, f"{axis}_parallel_size") for axis in axes}
    count = math.prod(sizes.values())
    split = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    processes = counted(count, "process", "processes")
    return f"{processes}{f': {split}' if split else ''}, ZeRO-{zero}, {precision}"


def _size(run: RunRecord, key: str) -> int:
    layout = run.manifest.layout if run.manifest else {}
    return layout.get(key) or layout.get(key.replace("_parallel", "_model_parallel")) or 1


def _speed(run: RunRecord) -> str | None:
    images, tokens, mfu = (run.median(key) for key in ("samples_per_s", "tokens_per_s", "mfu"))
    if images is None:
        return None
    speed = f"{images:.3g} images/s"
    if tokens is not None:
        speed += f", {number(round(tokens))} tokens/s"
    return speed if mfu is None else f"{speed}, MFU {mfu:.1%}"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:.1f} days"


def _guards(run: RunRecord) -> str | None:
    """Return the enabled fault checks; their findings are listed as events."""
    spikes, every = (
        run.setting(f"training.{key}") for key in ("spike_threshold", "check_replicas_every")
    )
    guards = [
        f"spikes of the loss, {number(spikes)} deviations above the median" if spikes else "",
        f"copies of weights and losses that differ, every {every} steps" if every else "",
    ]
    return "; ".join(guard for guard in guards if guard) or None


def _losses(run: RunRecord) -> Iterator[tuple[str, str]]:
    for key, name in (("validation_loss", "validation loss"), ("loss", "training loss")):
        values = run.series(key)[1]
        if values:
            yield name, f"{values[0]:.4f} → {values[-1]:.4f}"


def training_charts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield charts: losses of comparable runs together, other metrics of all runs together."""
    colored = [(place, run.name if len(runs) > 1 else "", run) for place, run in enumerate(runs)]
    kinds = list(dict.fromkeys(_comparable(run) for run in runs))
    for kind in kinds:
        members = [member for member in colored if _comparable(member[2]) == kind]
        yield from _loss_chart(f"Loss: {kind}" if len(kinds) > 1 else "Loss", members)
    for key, name, caption in (
        ("lr", "Learning rate", ""),
        ("grad_norm", "Gradient norm", "Before clipping; infinite values are left out."),
        ("samples_per_s", "Images per second", "Of the whole job, in training steps only."),
    ):
        yield from _measure_chart(key, name, colored, caption)
    for key in _validation_measures(runs):
        name = words(key.removeprefix("validation_"))
        measured = [member for member in colored if member[2].series(key)[0]]
        yield from _measure_chart(key, f"Validation: {name}", measured, _held_out(measured))


def _comparable(run: RunRecord) -> str:
    """Return a key that is equal for runs with comparable losses."""
    return f"{run.objective or 'run'}{', fine-tuning' if run.is_finetuning else ''}"


def _validation_measures(runs: Sequence[RunRecord]) -> list[str]:
    keys = itertools.chain.from_iterable(record for run in runs for record in run.metrics)
    found = dict.fromkeys(key for key in keys if key.startswith("validation_"))
    return [key for key in found if key != "validation_loss"]


def _loss_chart(title: str, runs: Colored) -> Iterator[Chart]:
    lines = []
    for place, name, run in runs:
        held_out = run.series("validation_loss")
        lines.append(Line(*run.series("loss"), place, "" if held_out[0] else name, faint=True))
        lines.append(Line(*held_out, place, name, marks=True))
    shown = [line for line in lines if line.x]
    caption = "Thin: training batches."
    if any(line.marks for line in shown):
        caption += f" Dots: validation. {_held_out(runs)}"
    if shown:
        yield line_chart(title, shown, x="step", y="loss", caption=caption)


def _held_out(runs: Colored) -> str:
    counts = {text(run.setting("training.validation_images")) for _, _, run in runs}
    return f"At most {' or '.join(sorted(counts))} validation images."


def _measure_chart(key: str, title: str, runs: Colored, caption: str) -> Iterator[Chart]:
    marks = key.startswith("validation_")
    lines = [Line(*run.series(key), place, name, marks=marks) for place, name, run in runs]
    shown = [line for line in lines if line.x]
    if shown:
        yield line_chart(title, shown, x="step", y="", caption=caption)


def events_table(runs: Sequence[RunRecord]) -> Table | None:
    """Return a table of events such as restarts and faults, or None if there were none."""
    events = [(run.name, str(step), what) for run in runs for step, what in sorted(_events(run))]
    columns = ("run", "step", "what")
    first = 0 if len(runs) > 1 else 1
    rows = [event[first:] for event in events]
    return Table("Events", columns[first:], rows) if rows else None


def _events(run: RunRecord) -> Iterator[tuple[int, str]]:
    for place, start in enumerate(run.starts):
        first = start.get("first_step", 0)
        again = "started" if place == 0 else "resumed" if first else "started again"
        where = f"{start.get('processes', 1)} × {start.get('device', '?')}"
        yield first, f"{again} {_minute(start)} on {where}"
    for fault in run.faults:
        code, what = fault.get("exit_code", "?"), fault.get("what", "?")
        yield fault.get("step", 0), f"ended {_minute(fault)} with exit code {code}: {what}"
    yield from _counted(run)
    for record in run.metrics:
        if "rolled_back_from" in record:
            yield record["step"], _rollback_event(record)


def _minute(line: Mapping[str, Any]) -> str:
    return f"{str(line.get('time', ''))[:16].replace('T', ' ')} UTC"


def _counted(run: RunRecord) -> Iterator[tuple[int, str]]:
    """Yield events from counters in the records of `metrics.jsonl`."""
    before = 0
    for record in run.metrics:
        step = record["step"]
        if count := int(record.get("steps_skipped", 0)):
            yield step, f"{counted(count, 'step')} skipped: gradients not finite"
        if count := int(record.get("loss_spikes", 0)):
            yield step, f"{counted(count, 'step')} with a spike of the loss"
        count = int(record.get("checkpoints_not_saved", 0))
        if count > before:
            yield step, f"{counted(count, 'checkpoint')} could not be written so far"
        before = max(before, count)


def _rollback_event(record: Mapping[str, Any]) -> str:
    """Describe a rollback: the bad steps and the data that is skipped."""
    first, last, times = (
        record.get(key, "?") for key in ("first_bad_step", "rolled_back_from", "times_gone_back")
    )
    return (
        f"rolled back here from step {last}: steps {first} to {last} were bad, rollback {times} of"
        f" the run; {record.get('batches_skipped', '?')} batches of the sample order skipped so far"
    )
