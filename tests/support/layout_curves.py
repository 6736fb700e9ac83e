"""Configs in other layouts, and the difference of training curves."""

from pathlib import Path
from typing import Any

from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.training.parity import parity_config

TOLERANCE = 1e-5


def make_config(path: Path, *overrides: str) -> RunConfig:
    return parity_config(load_config(path, overrides).config)


def with_layout(config: RunConfig, **layout: Any) -> RunConfig:
    return config.model_copy(update={"parallel": ParallelConfig(**layout)})


def largest_difference(curves: Any, reference: Any) -> float:
    return max(
        abs(mine - theirs) / abs(theirs)
        for curve in curves
        for ours, one in zip(curve, reference, strict=True)
        for mine, theirs in zip(ours, one, strict=True)
    )
