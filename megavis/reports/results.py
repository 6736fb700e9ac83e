"""Files of `RUN/evaluation/` as sections of a page.

Nothing is left out: JSON that `known_results.py` does not know becomes a table of what it holds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
from megavis.reports.eval_metrics import eval_metrics
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
    """Yield what says most at a glance: the probe, and what the run makes of held-out images."""
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
