"""Blocks of a report: charts, tables, pictures, confusion matrices and sections.

Charts are inline SVG in the page's light or dark colours: matplotlib draws with placeholder
colours, which are then replaced by the page's CSS variables.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NUM_COLORS = 6
_INK, _GRID, _OTHER = "#0000f0", "#0000f1", "#0000f2"
_VARIABLES = {_INK: "--ink-soft", _GRID: "--rule", _OTHER: "--other"}
_VARIABLES |= {f"#0000e{number}": f"--series-{number}" for number in range(NUM_COLORS)}
_WIDTH, _HEIGHT = 480, 270
_MOST_POINTS = 400
_TICKS = [1, 2, 2.5, 5, 10]
_STYLE: Any = {
    "svg.fonttype": "none",  # keep text as text, in the page's font
    "svg.hashsalt": "megavis",
    "font.size": 13,
    "font.family": "sans-serif",
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_NUMBER = re.compile(r"[-+−]?[\d.,]+(e[-+]?\d+)?( ?[%MKM²]| ± [\d.]+)?|–|")
_MOST_ROWS = 60
_MOST_ITEMS = 8


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        x: x values.
        y: as many y values.
        color: index of the series colour; None for the colour of reference lines.
        label: in the legend; empty for none.
        marks: draw a dot at each point.
        faint: draw it thin, for noisy data.
        dashed: draw it dashed.
        band: lower and upper values of a shaded band.
    """

    x: Sequence[float]
    y: Sequence[float]
    color: int | None
    label: str = ""
    marks: bool = False
    faint: bool = False
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def variable(self) -> str:
        """CSS variable of the line's colour."""
        return _VARIABLES[_color(self)]


@dataclass(frozen=True)
class Chart:
    """A chart as an SVG element.

    `legend` has label and CSS variable of each labelled line; the caption says what is needed to
    interpret the chart, such as N, split and seed.
    """

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    caption: str = ""
    kind: str = field(default="chart", init=False)


def line_chart(title: str, lines: Sequence[Line], *, x: str, y: str, caption: str = "") -> Chart:
    """Draw curves, at least one, in a chart; `x` and `y` label the axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    with mpl.rc_context(_STYLE):
        # At 72 points per inch, a unit of the SVG is a point.
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for line in lines:
            _plot(axes, line)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=_TICKS))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.margins(x=0.02)
        file = io.StringIO()
        empty = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", metadata=empty)
    legend = {line.label: line.variable for line in lines if line.label}
    return Chart(title, _inline(file.getvalue(), title), tuple(legend.items()), caption)


def _plot(axes: Axes, line: Line) -> None:
    color, (x, y) = _color(line), _thinned(line)
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=color, alpha=0.15, linewidth=0)
    axes.plot(
        x,
        y,
        "--" if line.dashed else "-",
        color=color,
        alpha=0.45 if line.faint else 1.0,
        linewidth=1.0 if line.faint else 1.8,
        # A single point would draw no line.
        marker="o" if line.marks or len(x) == 1 else None,
        markersize=4,
    )


def _color(line: Line) -> str:
    return _OTHER if line.color is None else f"#0000e{line.color % NUM_COLORS}"


def _thinned(line: Line) -> tuple[Sequence[float], Sequence[float]]:
    """Average neighbouring points if there are more than the chart can show."""
    size = -(-len(line.x) // _MOST_POINTS)
    if size <= 1:
        return line.x, line.y
    starts = range(0, len(line.x), size)
    x, y = ([fmean(values[at : at + size]) for at in starts] for values in (line.x, line.y))
    return x, y


def _inline(document: str, title: str) -> Markup:
    """Return the bare SVG element, without header, size, ids or fonts."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">', svg, count=1)
    # A style element would apply to the whole page.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg).replace("xlink:", "")
    for code, variable in _VARIABLES.items():
        svg = svg.replace(code, f"var({variable})")
    label = Markup("<title>{}</title>").format(title)
    return Markup(svg.replace('role="img">', f'role="img">{label}', 1))  # noqa: S704 - our own SVG


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


def csv_table(path: Path) -> Table:
    """Read the values of a CSV file as a collapsed table. Raises OSError and ValueError."""
    try:
        columns, *rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")))) or [[]]
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from None
    shown = [[_rounded(cell) for cell in row] for row in rows if len(row) == len(columns)]
    return _shortened("Values", [words(column) for column in columns], shown, closed=True)


def markdown_table(path: Path) -> Table:
    """Read the table of a Markdown file; its other lines become the caption. Raises OSError.

    Rows have as many cells as the first: others are filled up or cut off, as by GitHub.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [_cells(line) for line in lines if line[0] == "|"]
    columns, _, *content = rows or [[], []]
    width = len(columns)
    whole = [[*row, *[""] * (width - len(row))][:width] for row in content]
    caption = [line.lstrip("#- ").rstrip(".") for line in lines if line[0] != "|"]
    return Table("", columns, whole, "".join(f"{line}. " for line in caption).rstrip())


def _cells(line: str) -> list[str]:
    """Return the cells of a line that begins with a bar; in them, a backslash escapes bars."""
    _, *cells = re.split(r"(?<!\\)\|", line)
    cells = cells[:-1] if len(cells) > 1 and not cells[-1] else cells
    return [cell.strip().replace(r"\|", "|") for cell in cells]


def tables_of(value: Any, *, title: str) -> list[Table]:
    """Convert any JSON value to tables: scalars first, then nested values under their key."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        columns = list(dict.fromkeys(key for record in value for key in record))
        cells = [[text(record.get(column, "")) for column in columns] for record in value]
        return [_shortened(title, [words(column) for column in columns], cells)]
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
