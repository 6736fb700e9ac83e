"""Charts as inline SVG in the page's light or dark colours.

matplotlib draws with placeholder colours, which are then replaced by the page's CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
            _draw(axes, line)
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


def _draw(axes: Axes, line: Line) -> None:
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
