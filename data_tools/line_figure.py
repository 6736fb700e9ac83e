"""Plot a line as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence


def line_figure(
    points: Sequence[tuple[float, float]], *, xlabel: str, ylabel: str, doubling: bool = False
) -> bytes:
    """Plot y over x, at least one point, with y starting at zero; return the PNG.

    With `doubling` the x axis is logarithmic with a tick per point; else linear from zero.
    """
    # Imported here, since it is slow. Without pyplot, which would need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, marker="o", markersize=4, color="#1f5fa8")
    if doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.1 * max(ys))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
