"""Results of a learning-rate search: a Markdown table, a CSV table and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.data.format.files import write_atomically
from megavis.evaluation.figures import Row, plain_axes, write_figure
from megavis.training.search.learning_rate import TrialResult, best_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rows_of(outcomes: Sequence[TrialResult]) -> list[Row]:
    """Return one row a rate; the loss of a run that did not finish is empty."""
    best = best_of(outcomes)
    return [
        {
            "learning_rate": f"{outcome.rate:g}",
            "state": outcome.state,
            "step": outcome.step,
            "validation_loss": (
                f"{outcome.validation_loss:.6f}" if math.isfinite(outcome.validation_loss) else ""
            ),
            "validation_accuracy": ("" if outcome.accuracy is None else f"{outcome.accuracy:.6f}"),
            "best": "yes" if outcome == best else "",
            "run": outcome.folder,
        }
        for outcome in outcomes
    ]


def markdown_of(outcomes: Sequence[TrialResult]) -> str:
    """Return the rows as a Markdown table."""
    rows = rows_of(outcomes)
    lines = [[key.replace("_", " ") for key in rows[0]], ["---"] * len(rows[0])]
    lines += [[str(value) for value in row.values()] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw_search(outcomes: Sequence[TrialResult], *, name: str) -> Figure:
    """Draw the final validation loss over the rate; runs that were given up stand at the top.

    Args:
        outcomes: what `search_rates` has returned.
        name: of the config, for the title.
    """
    figure, axes = plain_axes("learning rate", "final validation loss")
    axes.set_xscale("log")
    finished = [outcome for outcome in outcomes if outcome.state == "finished"]
    axes.plot([o.rate for o in finished], [o.validation_loss for o in finished], "o-")
    for outcome in outcomes:
        if outcome.state != "finished":
            # In the axes' own height, since a run that was given up has no loss.
            place = axes.get_xaxis_transform()
            axes.plot([outcome.rate], [0.96], "x", color="#c2571a", transform=place)
            text = f"given up at step {outcome.step}"
            axes.annotate(text, (outcome.rate, 0.92), xycoords=place, ha="center", fontsize="small")
    best = best_of(outcomes)
    title = "no run finished" if best is None else f"best: {best.rate:g}"
    axes.set_title(f"{name}; {title}", fontsize="medium")
    axes.margins(0.15, 0.15)
    return figure


def write_search(folder: Path, outcomes: Sequence[TrialResult], *, name: str) -> list[Path]:
    """Write `search.png`, `search.csv` and `search.md`; returns them. Raises OSError."""
    written = write_figure(folder, "search", draw_search(outcomes, name=name), rows_of(outcomes))
    table = folder / "search.md"
    write_atomically(table, markdown_of(outcomes).encode())
    return [*written, table]
