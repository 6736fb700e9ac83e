"""The papers' published results: `published/<paper>.yaml`.

One file a paper; a table has its number in the paper, a title, what was measured on what, columns,
and rows as printed. Numbers stay text, so that 78.0 stays 78.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        table: its name in the paper, as `Table 2`.
        title: what it is about.
        measure: what kind of evaluation it is: `linear_probe`, `low_data`, `finetune`,
            `generation`, `transfer`, `classification` (linear probe and fine-tuning) and others.
        dataset: of all rows; empty where a column names it.
        metric: what the numbers are, with the unit.
        columns: c names.
        rows: each of c texts, digits as printed; empty where the paper gives none.
    """

    table: str
    title: str
    measure: str
    dataset: str
    metric: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PublishedPaper:
    """The tables of one paper.

    Attributes:
        title: of the paper.
        short: its short name, which the rows of its own models contain.
        tables: in the paper's order.
    """

    title: str
    short: str
    tables: tuple[PublishedTable, ...]


def published_papers() -> dict[str, PublishedPaper]:
    """Return the paper of each objective that has published numbers, by the objective's name."""
    return {objective: _paper(tree) for tree in _trees() for objective in tree["objectives"]}


def _trees() -> Iterator[dict]:
    folder = resources.files("megavis.evaluation") / "published"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        written = file.read_text(encoding="utf-8")
        yield yaml.load(written, Loader=yaml.BaseLoader)  # noqa: S506 - makes texts of all scalars


def _paper(tree: dict) -> PublishedPaper:
    tables = tuple(
        PublishedTable(
            table=table["table"],
            title=table["title"],
            measure=table["measure"],
            dataset=table.get("dataset", ""),
            metric=table["metric"],
            columns=tuple(table["columns"]),
            rows=tuple(tuple(row) for row in table["rows"]),
        )
        for table in tree["tables"]
    )
    return PublishedPaper(tree["paper"], tree["short"], tables)
