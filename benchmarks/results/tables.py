"""Shared code of the studies' pages: parts between marks, tables, and facts of finished runs.

A part of a page is between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.results.driver import TIMES
from benchmarks.results.tasks import TrainedMethod
from megavis.config.errors import UserError
from megavis.evaluation.result_files import Result
from megavis.evaluation.results import ClassAccuracy, EnsembleResult, FinetuneResult, ProbeResult
from megavis.reports.run_record import RunRecord
from megavis.training.metrics import read_json_lines

_SMALL = ("A small study: every command ran, and no number means anything.",)
_Kind = TypeVar("_Kind", bound=Result)


def write_parts(
    own: Path,
    page: Path | None,
    parts_for: Callable[[Path], Mapping[str, Sequence[str]]],
    *,
    small: bool,
) -> list[Path]:
    """Write a study's own page, and the parts of another one.

    Args:
        own: page of the parts alone, in the folder of the study.
        page: a page with the marks of all parts; None for none.
        parts_for: takes a page; returns the lines of each part by name, and copies their pictures
            next to the page.
        small: whether to say that no number means anything.

    Returns:
        The pages written.

    Raises:
        UserError: `page` does not exist, or lacks the marks of a part.
    """
    written = []
    for path in filter(None, (own, page)):
        marked = {
            name: "\n".join([_mark(name), *lines, _end(name)])
            for name, lines in parts_for(path).items()
        }
        if path == own:
            text = "\n\n".join([*_SMALL * small, *marked.values()]) + "\n"
        else:
            if not path.is_file():
                raise UserError(
                    f"{path}: there is no such page; make a file with the lines"
                    f" '{_mark(min(marked))}' and '{_end(min(marked))}', and those of other parts"
                )
            text = path.read_text(encoding="utf-8")
            for name, part in marked.items():
                text = _replaced(text, name, part, path)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _mark(name: str) -> str:
    return f"<!-- {name} -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def _replaced(text: str, name: str, part: str, path: Path) -> str:
    pattern = f"{re.escape(_mark(name))}.*?{re.escape(_end(name))}"
    text, count = re.subn(pattern, lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise UserError(f"{path}: must have '{_mark(name)}' and '{_end(name)}' once")
    return text


def filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows without columns that are empty except for the head."""
    keep = [
        number
        for number in range(len(rows[0]))
        if number < 1 or any(row[number] for row in rows[1:])
    ]
    return [[row[number] for number in keep] for row in rows]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, whose first row is the head."""
    head, *others = rows
    for line in (head, ["---"] * len(head), *others):
        yield f"| {' | '.join(line)} |"


def found(
    form: type[_Kind], folder: Path, methods: Sequence[TrainedMethod], name: Path
) -> list[_Kind]:
    """Return the results of the methods that have one.

    Args:
        form: of fine-tuned runs, or else of pre-trained ones.
        folder: of the study.
        methods: without a run of that kind are left out.
        name: of the file, in the run folder.

    Raises:
        UserError: a file has another form.
    """
    if form in (FinetuneResult, EnsembleResult):
        runs = [method.finetuned for method in methods if method.finetune]
    else:
        runs = [method.pretrained for method in methods if method.pretrain]
    return [form.read(folder / run / name) for run in runs if (folder / run / name).exists()]


def percent(shares: Sequence[float], seeds: int = 1) -> str:
    """Return the mean, with the sample standard deviation of several; empty for none."""
    if not shares:
        return ""
    text = f"{100 * statistics.fmean(shares):.1f}"
    if len(shares) > 1:
        text += f" ± {100 * statistics.stdev(shares):.1f}"
    return f"{text} %" + ("" if len(shares) == seeds else f", {len(shares)} of {seeds} seeds")


def best_layers(probes: Sequence[ProbeResult], seeds: int) -> str:
    """Return the accuracy of the best layers, with their numbers; empty for no probes."""
    if not probes:
        return ""
    layers = ", ".join(str(probe.best_layer.layer) for probe in probes)
    return f"{percent([probe.best_layer.accuracy for probe in probes], seeds)} (layer {layers})"


def top1(result: FinetuneResult) -> float:
    """Return the accuracy of images' classes, which all runs of the studies predict."""
    assert isinstance(result.accuracy, ClassAccuracy)
    return result.accuracy.top1


def processor_minutes(folder: Path, run: Path) -> float:
    """Return the processor minutes of a training, over all starts."""
    times = read_json_lines(folder / TIMES)
    return sum(each["processor_seconds"] for each in times if each["done"] == str(run)) / 60


def facts(folder: Path, runs: Sequence[Path]) -> Iterator[str]:
    """Yield machine, versions, days and commits of the runs that have started."""
    started = [folder / run for run in runs if (folder / run / "metrics.jsonl").exists()]
    times = [each for each in read_json_lines(folder / TIMES) if Path(each["done"]) in runs]
    start = RunRecord.read(started[0]).starts[-1]
    versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
    days = sorted({each["began"].split()[0] for each in times})
    # None while the first command runs.
    between = f"{' to '.join(dict.fromkeys((days[0], days[-1])))}; " if days else ""
    commits = ", ".join(dict.fromkeys(each["commit"] for each in times if each["commit"]))
    yield f"{start['machine']}; {between}{versions};"
    yield f"commit {commits or 'unknown'}.\n"


def missing(names: Iterable[str]) -> Iterator[str]:
    """Yield a line that names unfinished methods; nothing if there are none."""
    if found := "; ".join(names):
        yield f"Not finished yet: {found}."


def picture(drawn: Path, page: Path, folder: Path, text: str) -> Iterator[str]:
    """Yield the lines of a picture in a run folder, copied to a folder next to the page.

    A picture that is already there, drawn by another machine, is shown too.
    """
    name = f"{drawn.parents[1].name}_{drawn.name}"
    target = page.parent / folder / name
    if drawn.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, target)
    elif not target.exists():
        return
    yield f"\n![{text}]({folder}/{name})"
    yield f"\n{text}."
