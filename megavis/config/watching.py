"""Defaults and descriptions shared by the `evaluation` section and `megavis evaluate watch`.

Training starts that command with the section's keys. This file does not import pydantic, so that
`--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Measure = Literal["loss", "probe", "neighbors", "samples", "frechet"]
"""Metrics that can be measured for each new checkpoint."""

MEASURES: tuple[Measure, ...] = get_args(Measure)
"""All of them."""


@dataclass(frozen=True)
class WatchOption:
    """A key of the section, and an option of the command."""

    default: Any
    description: str


WATCH_OPTIONS = {
    "what": WatchOption(
        ("loss", "probe"),
        "Any of `loss` (of validation), `probe` (a linear one), `neighbors` (a classifier by"
        " nearest neighbours), `samples` (a grid of images) and `frechet` (distance of generated"
        " images).",
    ),
    "every": WatchOption(
        1, "Evaluate only checkpoints whose step is a multiple of this, and the last one."
    ),
    "interval": WatchOption(5.0, "Seconds between polls for a new checkpoint."),
    "reference": WatchOption(
        None,
        "For `frechet`: statistics of real images, written by `megavis evaluate statistics`, ADM or"
        " pytorch-fid.",
    ),
    "num_samples": WatchOption(1000, "For `frechet`: images to generate per checkpoint."),
}
