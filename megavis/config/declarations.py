"""Declarations of figures and released weights, without torch; their code is imported when needed.

A paper declares its own in `megavis/papers/NAME/__init__.py`, in the tuples `FIGURES` and
`IMPORTS`; `megavis figure` and `megavis import` list them by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavis.config.arguments import positive
from megavis.config.papers import declared


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
    """Return the figures declared by papers."""
    return declared("FIGURES")


@dataclass(frozen=True)
class ImportOption:
    """An option of `megavis import`, as for argparse; forms may share one declaration."""

    name: str
    help: str
    type: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    default: Any = None
    metavar: str | None = None


@dataclass(frozen=True)
class ImportSpec:
    """A form of released weights.

    Attributes:
        name: as users type it.
        help: what is read, as a sentence after the name.
        read: function as "module:function"; takes the command's arguments, and returns a
            `ReleasedRun` (`megavis.composition.released_run`).
        options: besides the source and the run folder.
        model_types: values of `model_type` in the `config.json` of a folder of the Hub that is read
            this way; `timm` for a folder of timm, which names an architecture instead.
    """

    name: str
    help: str
    read: str
    options: tuple[ImportOption, ...] = ()
    model_types: tuple[str, ...] = ()


IMAGE_SIZE = ImportOption(
    "--image-size", "side of the images in pixels; default: 256", type=positive, default=256
)
HEADS = ImportOption("--heads", "attention heads; default: width / 64", type=positive)
PALETTE = ImportOption(
    "--palette", "kmeans_centers.npy; default: the folder's own", type=Path, metavar="FILE"
)


def paper_imports() -> Iterator[ImportSpec]:
    """Return the forms declared by papers."""
    return declared("IMPORTS")
