"""Figures as they are declared, without torch; what draws them is imported when they are drawn.

A paper declares its own in `megavis/papers/NAME/figures.py`, as a tuple `FIGURES`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megavis.config.papers import room_module, rooms


def _no_options(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class FigureSpec:
    """A figure of a run and of held-out images.

    Attributes:
        name: as users type it.
        help: what it shows, in a line.
        description: what is computed and drawn.
        num_images: default of `--num-images`.
        draw: what draws it, as "module:function"; takes `FigureInput` and the options, and returns
            a `Drawing` (`megavis.evaluation.figures`).
        applies: function of the same module that takes the run's objective and says whether it has
            such a figure.
        example: words after `megavis figure NAME`.
        add_options: adds options of its own.
    """

    name: str
    help: str
    description: str
    num_images: int
    draw: str
    applies: str = "applies"
    example: str = "runs/demo"
    add_options: Callable[[argparse.ArgumentParser], None] = _no_options


def paper_figures() -> Iterator[FigureSpec]:
    """Yield the figures that the papers declare."""
    for module in filter(None, (room_module(room, "figures") for room in rooms())):
        yield from importlib.import_module(module).FIGURES
