"""Declarations of figures, without torch; plotting code is imported when needed.

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
        help: one line on what it shows.
        description: what is computed and plotted.
        num_images: default of `--num-images`.
        draw: plotting function as "module:function"; takes `FigureInput` and the options, returns
            a `RenderedFigure` (`megavis.evaluation.figures`).
        applies: function of the same module that takes the run's objective; returns whether it has
            such a figure.
        example: arguments after `megavis figure NAME`.
        add_options: adds its own options.
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
    """Yield the figures declared by papers."""
    for module in filter(None, (room_module(room, "figures") for room in rooms())):
        yield from importlib.import_module(module).FIGURES
