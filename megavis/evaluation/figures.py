"""Plot evaluation results as PNG, with their values as CSV.

Accuracy by depth and by loss (iGPT, Figures 2 and 3), confusion matrices, and helpers of all
figures: axes, files, TensorBoard.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.data.format.files import write_atomically
from megavis.evaluation.event_files import EventFile

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megavis.composition.trainable import Trainable
    from megavis.data.loading.dataset import ShardDataset
    from megavis.evaluation.probe import CheckpointScore
    from megavis.evaluation.results import ProbeResult
    from megavis.model.inference import Inference

Row = Mapping[str, Any]
_TRAINED, _UNTRAINED, _PIXELS = "#1f5fa8", "#8a8a8a", "#c2571a"


@dataclass(frozen=True)
class FigureInput:
    """Input of a figure: a run on one process, and held-out images.

    Attributes:
        images: held-out images in the run's input format.
    """

    folder: Path
    objective: Trainable
    inference: Inference
    images: ShardDataset

    @property
    def name(self) -> str:
        """Name of the run, for titles."""
        return self.folder.name


@dataclass(frozen=True)
class RenderedFigure:
    """A rendered figure.

    Attributes:
        picture: a chart, or pixels uint8 `[H, W, 3]`.
        rows: its values; empty if it has no table.
    """

    picture: Figure | np.ndarray
    rows: Sequence[Row] = ()
    lines: Sequence[str] = ()


def depth_rows(result: ProbeResult) -> list[Row]:
    """Return accuracy by layer, in [0, 1]: trained, untrained (mean and range), raw pixels."""
    rows: list[Row] = []
    for trained, *untrained in zip(result.trained, *result.untrained, strict=True):
        fresh = [score.accuracy for score in untrained]
        rows.append(
            {
                "layer": trained.layer,
                "trained": trained.accuracy,
                "trained_vote": trained.vote_accuracy,
                "untrained_mean": statistics.fmean(fresh),
                "untrained_lowest": min(fresh),
                "untrained_highest": max(fresh),
                "raw_pixels": result.pixels.accuracy,
            }
        )
    return rows


def plot_depth(result: ProbeResult, *, name: str) -> Figure:
    """Plot accuracy by depth, of a probe of several layers (iGPT, Figure 2)."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = plain_axes("layer", "linear probe accuracy (%)")
    columns = _columns(depth_rows(result))
    layers = columns["layer"]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _line(axes, layers, columns["trained"], _TRAINED, f"step {result.step}")
    if result.num_views > 1:
        vote = f"step {result.step}, vote of {result.num_views} masks"
        _line(axes, layers, columns["trained_vote"], _TRAINED, vote, linestyle=":")
    low, high = _percent(columns["untrained_lowest"]), _percent(columns["untrained_highest"])
    axes.fill_between(layers, low, high, color=_UNTRAINED, alpha=0.2, linewidth=0)
    networks = f"untrained, mean and range of {len(result.untrained)}"
    _line(axes, layers, columns["untrained_mean"], _UNTRAINED, networks)
    axes.axhline(100 * result.pixels.accuracy, color=_PIXELS, linestyle="--", label="raw pixels")
    best = result.best_layer
    axes.plot(
        [best.layer], [100 * best.accuracy], "o", markersize=12, fillstyle="none", color=_TRAINED
    )
    axes.set_title(
        f"{name}: {result.num_classes} classes, {result.num_validation} validation images\n"
        "circle: best on held-out training images",
        fontsize="medium",
    )
    legend_below(figure)
    return figure


def plot_likelihood(scores: Sequence[CheckpointScore], *, pixels: float) -> Figure:
    """Plot accuracy over validation loss, one line per run (iGPT, Figure 3).

    Scores are in order of steps; `pixels` is the accuracy of raw pixels, in [0, 1].
    """
    figure, axes = plain_axes("validation loss, falling to the right", "best layer's accuracy (%)")
    axes.axhline(100 * pixels, color=_PIXELS, linestyle="--", label="raw pixels")
    for number, run in enumerate(dict.fromkeys(score.run for score in scores)):
        points = [score for score in scores if score.run == run]
        losses = [score.validation_loss for score in points]
        color = _TRAINED if number == 0 else f"C{number}"
        _line(axes, losses, [score.accuracy for score in points], color, run)
        for score in points:
            axes.annotate(
                f"{score.step}",
                (score.validation_loss, 100 * score.accuracy),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize="small",
            )
    axes.invert_xaxis()
    axes.margins(0.08, 0.15)
    axes.set_title("checkpoints by step", fontsize="medium")
    legend_below(figure)
    return figure


def plot_confusion(confusion: np.ndarray, class_names: Sequence[str], *, title: str) -> Figure:
    """Plot a confusion matrix of classes (rows) and predictions (columns)."""
    import numpy as np
    from matplotlib.figure import Figure

    size = max(4.5, min(12.0, 0.55 * len(class_names) + 2))
    figure = Figure(figsize=(size, size), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="answer", ylabel="class")
    shares = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_title(title, fontsize="medium")
    if len(class_names) > 25:  # names and counts would overlap
        return figure
    places = range(len(class_names))
    axes.set_xticks(places, class_names, rotation=90, fontsize="small")
    axes.set_yticks(places, class_names, fontsize="small")
    for row, column in zip(*np.nonzero(confusion), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        text = str(confusion[row, column])
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
    return figure


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure atomically. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_atomically(path, picture.getvalue())


def show_in_tensorboard(run_folder: Path, name: str, figure: Figure, *, step: int) -> None:
    """Add a figure to a run's TensorBoard in a new event file. Raises OSError."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    events = EventFile(run_folder, suffix=f".{name}")
    events.add_image(step, f"evaluation/{name}", pixels)
    events.write()


def write_table(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows as CSV atomically and return the path. Raises OSError."""
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, table.getvalue().encode())
    return path


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, in whose cells a backslash escapes bars."""
    whole = (columns, ["---"] * len(columns), *rows)
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in whole)
    return [f"| {' | '.join(row)} |" for row in escaped]


def plain_axes(x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure with two labelled axes."""
    # Avoid pyplot, which has global state and may need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_below(figure: Figure, *, columns: int = 2) -> None:
    """Add a legend below the axes, where it covers no curve."""
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def _line(axes: Axes, x: Any, share: Any, color: str, label: str, *, linestyle: str = "-") -> None:
    axes.plot(x, _percent(share), linestyle, marker="o", markersize=4, color=color, label=label)


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def _percent(shares: Iterable[float]) -> list[float]:
    return [100 * share for share in shares]
