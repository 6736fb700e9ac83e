"""Results of dense prediction in the form of a paper's table: reconstructed and predicted maps.

The paper's rows come first, then the run's, whose data are named below.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megavis.data.codecs.label_maps import TargetKind
from megavis.evaluation.published import PublishedTable, published_papers

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
    rows = [table.columns, ["---"] * len(table.columns), *table.rows, (name, *own)]
    lines = (
        f"# {table.table}: {table.title}",
        "",
        *(_line(row) for row in rows),
        "",
        f"Rows above {name} are the paper's: {table.dataset}.",
        f"That of {name} is of {images}: other data, unless these are the same images.",
    )
    return "".join(f"{line}\n" for line in lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
