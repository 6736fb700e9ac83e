"""Published results of the papers, from `published/<paper>.yaml`, and a run's row in such a table.

A table has its number in the paper, a title, measure and data set, columns, and rows as printed.
Numbers stay text, so that 78.0 stays 78.0. Results of dense prediction, of reconstructed and of
predicted maps, take its form: the paper's rows come first, then the run's, whose data are named
below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from megavis.data.codecs.label_maps import TargetKind
from megavis.evaluation.figures import markdown_table


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


def published_papers() -> dict[str, PublishedPaper]:
    """Return the papers with published results by name of their objective."""
    folder = resources.files("megavis.evaluation") / "published"
    papers: dict[str, PublishedPaper] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        written = file.read_text(encoding="utf-8")
        tree = yaml.load(written, Loader=yaml.BaseLoader)  # noqa: S506 - keeps all scalars as text
        tables = _TABLES.validate_python(tree["tables"])
        papers |= dict.fromkeys(
            tree["objectives"], PublishedPaper(tree["paper"], tree["short"], tables)
        )
    return papers


METRICS: Mapping[TargetKind, str] = {"panoptic": "PQ", "depth": "RMSE"}
"""Metric of the table by kind of the maps, as a column names it before the stage."""
STAGES = ("recon.", "inference")


def dense_table(objective: str) -> PublishedTable | None:
    """Return the table of dense prediction in the paper of an objective; None without one."""
    paper = published_papers().get(objective)
    tables = paper.tables if paper else ()
    return next((table for table in tables if table.measure == "dense_prediction"), None)


def reconstruction_of(tokenizer: Path, file: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the errors of a run's tokenizer, if it was evaluated on the same images; else none.

    Args:
        tokenizer: run folder of the autoencoder.
        file: name of its evaluation's file.
        result: of the run that has this tokenizer.
    """
    path = tokenizer / "evaluation" / file
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    is_same = all(found.get(key) == result[key] for key in ("of", "images"))
    return found.get("all", {}) if is_same else {}


def markdown_of(
    table: PublishedTable, name: str, values: Mapping[str, float], *, images: str
) -> str:
    """Return the table with a further row.

    Args:
        table: of the paper.
        name: of the run.
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
