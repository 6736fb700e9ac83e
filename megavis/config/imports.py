"""Declarations of released weights that papers read, without torch.

A paper declares its own in `megavis/papers/NAME/imports.py`, as a tuple `IMPORTS`; `megavis import`
lists them by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavis.config.arguments import positive
from megavis.config.papers import room_module, rooms


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
    """Yield the forms declared by papers."""
    for module in filter(None, (room_module(room, "imports") for room in rooms())):
        yield from importlib.import_module(module).IMPORTS
