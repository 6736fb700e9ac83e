"""The error of a palette over its number of colours, as a CSV and a plot."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_tools.line_figure import line_figure
from megavis.data.format.files import write_atomically
from megavis.tokenizers.palette import MAX_COLORS, fit_palette

Point = tuple[int, float]
"""Number of colours, and mean squared error summed over red, green, blue in 0..255."""


def color_counts(text: str) -> tuple[int, ...]:
    """Read `64,128,256`. Raises argparse.ArgumentTypeError."""
    try:
        counts = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or not 1 <= counts[0] <= counts[-1] <= MAX_COLORS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers in 1..{MAX_COLORS}, like 64,128,256,512"
        )
    return counts


def measure(pixels: np.ndarray, counts: Sequence[int], *, seed: int, known: Point) -> list[Point]:
    """Fit a palette of each size to pixels uint8 `[n, 3]`; `known` is not fitted again."""
    points = []
    for count in counts:
        error = known[1]
        if count != known[0]:
            _, error = fit_palette(pixels, num_colors=count, seed=seed)
        points.append((count, error))
    return points


def write(points: Sequence[Point], palette_path: Path) -> tuple[Path, Path]:
    """Write `<palette>_curve.csv` and `.png` next to the palette; return both paths."""
    table = palette_path.with_name(f"{palette_path.stem}_curve.csv")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["num_colors", "mean_squared_error"])
    rows.writerows((count, f"{error:.3f}") for count, error in points)
    write_atomically(table, text.getvalue().encode())
    picture = table.with_suffix(".png")
    error = "mean squared error (RGB, 0..255)"
    write_atomically(picture, line_figure(points, xlabel="colours", ylabel=error, doubling=True))
    return table, picture
