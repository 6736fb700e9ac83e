"""Blocks of a report: tables, pictures, confusion matrices and sections."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavis.reports.charts import Chart

_NUMBER = re.compile(r"[-+−]?[\d.,]+(e[-+]?\d+)?( ?[%MKM²]| ± [\d.]+)?|–|")
_MOST_ROWS = 60
_MOST_ITEMS = 8


@dataclass(frozen=True)
class Table:
    """A table of text, with a title above and a caption below it.

    Rows whose index is in `marked` are highlighted; a `closed` table is collapsed at first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: frozenset[int] = frozenset()
    closed: bool = False
    kind: str = field(default="table", init=False)

    def open(self) -> Table:
        """Return the table without a title, for a place that shows the title already."""
        return dataclasses.replace(self, title="")

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds only numbers, which are right-aligned."""
        return [
            all(_NUMBER.fullmatch(row[column]) for row in self.rows)
            for column in range(len(self.columns))
        ]


@dataclass(frozen=True)
class Picture:
    """A PNG embedded in the page as a data URI, with its size in pixels.

    `on_white`: it was drawn for a white background.
    """

    title: str
    uri: str
    caption: str
    width: int
    height: int
    on_white: bool = False
    kind: str = field(default="picture", init=False)


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: how often each class (row) was predicted as each class (column)."""

    title: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    caption: str
    kind: str = field(default="confusion", init=False)

    @property
    def shares(self) -> list[list[float]]:
        """The counts as fractions of their rows, in [0, 1]."""
        return [[count / max(1, sum(row)) for count in row] for row in self.counts]


Block = Chart | Table | Picture | Confusion


@dataclass(frozen=True)
class PageSection:
    """A heading, a note below it, and blocks."""

    title: str
    blocks: Sequence[Block]
    note: str = ""


def picture(path: Path, *, title: str, caption: str = "", on_white: bool = False) -> Picture:
    """Read a PNG. Raises OSError, and ValueError if it is not a PNG."""
    content = path.read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{path}: not a PNG")
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Picture(title, uri, caption, width, height, on_white)


def csv_table(path: Path, *, title: str) -> Table:
    """Read a CSV file as a collapsed table. Raises OSError."""
    columns, *rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")))) or [[]]
    shown = [[_rounded(cell) for cell in row] for row in rows if len(row) == len(columns)]
    return _shortened(title, [words(column) for column in columns], shown, closed=True)


def markdown_table(path: Path) -> Table:
    """Read the table of a Markdown file; its other lines become the caption. Raises OSError."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[0] == "|"]
    columns, _, *content = rows or [[], []]
    caption = [line.lstrip("#- ").rstrip(".") for line in lines if line[0] != "|"]
    return Table("", columns, content, "".join(f"{line}. " for line in caption).rstrip())


def tables_of(value: Any, *, title: str) -> list[Table]:
    """Convert any JSON value to tables: scalars first, then nested values under their key."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_table_of_records(value, title)]
    if isinstance(value, list):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict):
        value = {"value": value}
    plain = {key: item for key, item in value.items() if _is_plain(item)}
    rows = [(words(key), text(item)) for key, item in plain.items()]
    tables = [_shortened(title, ("", "value"), rows)] if rows else []
    for key, item in value.items():
        if key not in plain:
            tables += tables_of(item, title=f"{title}: {words(key)}")
    return tables


def _table_of_records(records: Sequence[Mapping[str, Any]], title: str) -> Table:
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[text(record.get(column, "")) for column in columns] for record in records]
    return _shortened(title, [words(column) for column in columns], rows)


def _shortened(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, closed: bool = False
) -> Table:
    left = len(rows) - _MOST_ROWS
    caption = f"The first {_MOST_ROWS} of {len(rows)} rows." if left > 0 else ""
    return Table(title, columns, rows[:_MOST_ROWS], caption, closed=closed)


def _is_plain(value: Any) -> bool:
    """Return whether a value fits into one cell."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, dict)


def text(value: Any) -> str:
    """Format a JSON value as readable text."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        shown = ", ".join(text(item) for item in value[:_MOST_ITEMS])
        return shown if len(value) <= _MOST_ITEMS else f"{shown}, … ({len(value)})"
    if isinstance(value, dict):
        return ", ".join(f"{words(key)} {text(item)}" for key, item in value.items())
    return number(value) if isinstance(value, int | float) else str(value)


def number(value: float) -> str:
    """Format with four significant digits; integers in full, with thin spaces."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return f"{int(value):,}".replace(",", "\u202f") if abs(value) >= 10_000 else str(int(value))
    return f"{value:.4g}"


def percent(share: float | None) -> str:
    """Format a fraction in [0, 1] as `95.7 %`."""
    return "–" if share is None else f"{100 * share:.1f} %"


def words(key: str) -> str:
    """Replace underscores by spaces: `num_images` becomes `num images`."""
    return str(key).replace("_", " ")


def _rounded(cell: str) -> str:
    try:
        return number(float(cell)) if "." in cell or "e" in cell else cell
    except ValueError:
        return cell
