"""Where the commands that draw put their figure, and what they say of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megavis.evaluation.figures import Row


def save_figure(folder: Path, name: str, picture: Figure, rows: Sequence[Row]) -> None:
    """Write `name.png` and `name.csv` into a folder, and print a line for each. Raises OSError."""
    from megavis.evaluation.figures import write_figure

    for path in write_figure(folder, name, picture, rows):
        sys.stdout.write(f"{path}\n")
