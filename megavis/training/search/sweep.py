"""Sweep over a grid of keys; every point is an ordinary run or a chain of runs.

Examples are in "Denoising Autoregressive Representation Learning": the noise schedules of figure 3
(a and b on a logarithmic grid from 0.1 to 10, each pre-trained and then fine-tuned), and the sweep
of table 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.config.arguments import SweepAxis
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.config.schema import RunConfig
from megavis.evaluation.figures import Row
from megavis.grammar.same_run import source_differences
from megavis.parallel.context import ParallelContext
from megavis.training.search.trial import check_trial, given_up_at, is_finished, train_trial

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Load = Callable[[Sequence[str]], LoadedConfig]
"""Loads the sweep's config with additional `key=value` words."""


@dataclass(frozen=True)
class Point:
    """One point of the grid: a value per key, and a chain of configs.

    Each is trained from the weights of the previous run.
    """

    values: tuple[str, ...]
    runs: tuple[LoadedConfig, ...]

    @property
    def folder(self) -> Path:
        """Folder of the last run."""
        return self.runs[-1].config.folder

    @property
    def step(self) -> int:
        """Step of the last run's newest checkpoint; 0 without one."""
        checkpoint = latest_checkpoint(self.folder)
        return 0 if checkpoint is None else read_manifest(checkpoint).step

    def check(self) -> None:
        """Raise UserError if a folder holds a run that was trained otherwise."""
        for loaded in self.runs:
            with loaded.source.locate():
                check_trial(loaded.config)

    @property
    def is_finished(self) -> bool:
        """Whether the last run has finished."""
        return is_finished(self.runs[-1].config, self.folder)


def points_of(axes: Sequence[SweepAxis], loads: Sequence[Load]) -> list[Point]:
    """Return the grid with the last key varying fastest; every config is checked.

    Args:
        loads: loaders of the base config and of the configs that start from its run, in order. Keys
            of the architecture are set in all of them, others in the first.

    Raises:
        UserError: a key is given twice, a value is invalid, or a config cannot start from the run
            of the one before it.
    """
    keys = [axis.key for axis in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UserError(f"--grid gives {twice} twice")
    names, points = [load([]).config.name for load in loads], []
    for values in product(*(axis.values for axis in axes)):
        chosen = list(zip(axes, values, strict=True))
        parts = [f"{axis.short}-{value}" for axis, value in chosen]
        runs: list[LoadedConfig] = []
        for name, load in zip(names, loads, strict=True):
            words = [
                f"{axis.key}={value}"
                for axis, value in chosen
                if not runs or is_of_architecture(axis.key)
            ]
            if runs:
                words.append(f"finetune.from_run={runs[-1].config.folder}")
            loaded = load([*words, f"name={'-'.join([name, *parts])}"])
            if runs:
                _check_source(runs[-1].config, loaded.config)
            runs.append(loaded)
        points.append(Point(values, tuple(runs)))
    return points


def is_of_architecture(word: str) -> bool:
    """Return whether a key, or an override, is of a section that fine-tuning takes over."""
    return word.startswith(("objective.", "objective=", "model.", "model="))


def _check_source(source: RunConfig, config: RunConfig) -> None:
    """Reject a config that could not start from a run, before that run is trained."""
    if (difference := next(source_differences(source, config), None)) is not None:
        would = difference.replace("was trained", "would be trained", 1)
        raise UserError(f"{config.name} cannot start from {source.name}, which {would}")


def train_run(config: RunConfig, context: ParallelContext) -> bool:
    """Train one run to its end, from its newest checkpoint.

    Returns False if too many steps in a row were bad: the run is given up, and a later sweep does
    not resume it. Raises UserError if the folder holds a run that was trained otherwise.
    """
    context.on_main(lambda: check_trial(config))
    # The folder may appear older on another node.
    if context.from_main(given_up_at(config)) is not None:
        return False
    if not context.from_main(is_finished(config, config.folder)):
        train_trial(config, context)
    return context.from_main(given_up_at(config)) is None


def rows_of(
    axes: Sequence[SweepAxis], points: Sequence[Point], scores: Sequence[float]
) -> list[Row]:
    """Return one row per point; the score of an unfinished run is empty."""
    return [
        {
            **{axis.key: value for axis, value in zip(axes, point.values, strict=True)},
            "score": "" if math.isnan(score) else f"{score:.6f}",
            "run": str(point.folder),
        }
        for point, score in zip(points, scores, strict=True)
    ]


def plot_sweep(
    axes: Sequence[SweepAxis], scores: Sequence[float], *, name: str, what: str
) -> Figure:
    """Draw a heat map of the last two keys for each combination of the others, as in figure 3.

    The last key is on the vertical axis, the one before it on the horizontal axis. Scores are in
    the order of `points_of`, nan for none; `what` names them.
    """
    import numpy as np
    from matplotlib.figure import Figure

    *others, right, up = [SweepAxis("", ("",)), *axes] if len(axes) == 1 else axes
    tables = np.array(scores).reshape(-1, len(right.values), len(up.values))
    titles = [
        ", ".join(f"{axis.short} {value}" for axis, value in zip(others, values, strict=True))
        for values in product(*(axis.values for axis in others))
    ]
    columns = math.ceil(math.sqrt(len(titles)))
    rows = math.ceil(len(titles) / columns)
    size = (6.0 * columns, 4.8 * rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    known = tables[~np.isnan(tables)]
    limits = (known.min(), known.max()) if known.size else (0.0, 1.0)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for cells in grid[len(titles) :]:
        cells.set_axis_off()
    for cells, table, title in zip(grid, tables, titles, strict=False):
        picture = _plot_cells(cells, table.T, right, up, limits)
        cells.set_title(f"{name} {title}".strip(), fontsize="medium")
    figure.colorbar(picture, ax=list(grid), label=what)
    return figure


def _plot_cells(
    cells: Axes, table: np.ndarray, right: SweepAxis, up: SweepAxis, limits: tuple[float, float]
) -> AxesImage:
    """Draw scores `[up, right]`; `limits` bound the color map."""
    lowest, highest = limits
    picture = cells.imshow(
        table, origin="lower", cmap="viridis", aspect="auto", vmin=lowest, vmax=highest
    )
    cells.set_xticks(range(len(right.values)), right.values)
    cells.set_yticks(range(len(up.values)), up.values)
    cells.set_xlabel(right.short)
    cells.set_ylabel(up.short)
    for row, scores in enumerate(table):
        for column, score in enumerate(scores):
            if not math.isnan(score):
                frame = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 1.5}
                cells.text(column, row, f"{score:.3g}", ha="center", va="center", bbox=frame)
    return picture
