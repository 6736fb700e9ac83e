"""Published results of the papers, from `published/<paper>.yaml`.

A table has its number in the paper, a title, measure and data set, columns, and rows as printed.
Numbers stay text, so that 78.0 stays 78.0.
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
    dataset: str
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


def published_papers() -> dict[str, PublishedPaper]:
    """Return the papers with published results by name of their objective."""
    return {objective: _paper(tree) for tree in _trees() for objective in tree["objectives"]}


def _trees() -> Iterator[dict]:
    folder = resources.files("megavis.evaluation") / "published"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        written = file.read_text(encoding="utf-8")
        yield yaml.load(written, Loader=yaml.BaseLoader)  # noqa: S506 - keeps all scalars as text


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
