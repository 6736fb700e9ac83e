"""A grid over two keys: every point is an ordinary run; all points form one heat map.

Made for the noise schedules of "Denoising Autoregressive Representation Learning" (section 4.1,
figure 3: a and b on a logarithmic grid from 0.1 to 10); works for any two keys.
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
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.evaluation.figures import Row
from megavis.parallel.context import ParallelContext
from megavis.training.faults.interruption import Signals
from megavis.training.job import hold_run
from megavis.training.search.axis import SweepAxis
from megavis.training.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Load = Callable[[Sequence[str]], LoadedConfig]
"""Loads the sweep's config with additional `key=value` words."""


@dataclass(frozen=True)
class Point:
    """One run of the grid."""

    values: tuple[str, str]
    loaded: LoadedConfig

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.loaded.config.folder)

    @property
    def step(self) -> int:
        """The step of its newest checkpoint; 0 if there is none."""
        checkpoint = latest_checkpoint(self.folder)
        return 0 if checkpoint is None else read_manifest(checkpoint).step

    @property
    def is_finished(self) -> bool:
        """Whether it has been trained to its last step."""
        return self.step == self.loaded.config.training.steps


def points_of(axes: Sequence[SweepAxis], load: Load) -> list[Point]:
    """Return the grid, the second key's values changing fastest; every config is checked.

    Raises:
        UserError: there are not two keys, or a value does not fit the config.
    """
    if len(axes) != 2 or axes[0].key == axes[1].key:
        raise UserError(f"a heat map has two keys: give --grid twice, not {len(axes)} time(s)")
    name, points = load([]).config.name, []
    for pair in product(axes[0].values, axes[1].values):
        words = [f"{axis.key}={value}" for axis, value in zip(axes, pair, strict=True)]
        parts = [f"{axis.short}-{value}" for axis, value in zip(axes, pair, strict=True)]
        points.append(Point(pair, load([*words, f"name={'-'.join([name, *parts])}"])))
    return points


def train_point(point: Point, context: ParallelContext) -> None:
    """Train one run to its end, from its newest checkpoint."""
    if not point.is_finished:
        with Signals() as signals, hold_run(point.folder, context):
            Trainer.open(point.loaded, context).train(signals)


def rows_of(
    axes: Sequence[SweepAxis], points: Sequence[Point], scores: Sequence[float]
) -> list[Row]:
    """Return one row per point; the score of an unfinished run is empty."""
    first, second = axes
    return [
        {
            first.key: point.values[0],
            second.key: point.values[1],
            "score": "" if math.isnan(score) else f"{score:.6f}",
            "run": str(point.folder),
        }
        for point, score in zip(points, scores, strict=True)
    ]


def draw_sweep(
    axes: Sequence[SweepAxis], scores: Sequence[float], *, name: str, what: str
) -> Figure:
    """Plot the heat map: the first key to the right, the second upwards, as in figure 3.

    Args:
        axes: two of them.
        scores: in the order of `points_of`; NaN if missing.
        name: of the config, for the title.
        what: name of the score.
    """
    import numpy as np
    from matplotlib.figure import Figure

    table = np.array(scores).reshape(len(axes[0].values), len(axes[1].values)).T
    figure = Figure(figsize=(6.0, 4.8), dpi=150, layout="constrained")
    cells = figure.add_subplot()
    picture = cells.imshow(table, origin="lower", cmap="viridis", aspect="auto")
    cells.set_xticks(range(len(axes[0].values)), axes[0].values)
    cells.set_yticks(range(len(axes[1].values)), axes[1].values)
    cells.set_xlabel(axes[0].short)
    cells.set_ylabel(axes[1].short)
    for (row, column), score in np.ndenumerate(table):
        if not math.isnan(score):
            frame = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 1.5}
            cells.text(column, row, f"{score:.3g}", ha="center", va="center", bbox=frame)
    figure.colorbar(picture, ax=cells, label=what)
    cells.set_title(name, fontsize="medium")
    return figure
