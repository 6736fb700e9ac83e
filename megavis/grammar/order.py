"""Orders of tokens as a config gives them: a kind, a list, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import numpy as np
from pydantic import BeforeValidator, Field

from megavis.config.section import OrderKind


def read_order(value: object) -> object:
    """Parse an order: a kind, a list of tokens, or a `.npy` file with such a list.

    The file is replaced by its content, so that a run does not depend on it and cannot resume with
    another order.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and value.endswith(".npy"):
        return _read_file(Path(value))
    if isinstance(value, str) and value not in get_args(OrderKind):
        raise ValueError(f"must be one of {', '.join(get_args(OrderKind))} or a .npy file")
    # Compared as text: elements of a YAML list can be of any type.
    if isinstance(value, list | tuple) and {*map(str, value)} != {*map(str, range(len(value)))}:
        raise ValueError("must list every token, counted from 0, once")
    return value


def _read_file(path: Path) -> tuple[int, ...]:
    try:
        pixels = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        raise ValueError("must be a file written by numpy.save") from None
    is_vector = isinstance(pixels, np.ndarray) and pixels.ndim == 1
    if not is_vector or not np.array_equal(np.sort(pixels), np.arange(len(pixels))):
        raise ValueError(
            "must contain a permutation: a vector of every token, counted from 0, once"
        )
    return tuple(int(pixel) for pixel in pixels)


Order = Annotated[
    str | Annotated[tuple[int, ...], Field(strict=False)], BeforeValidator(read_order)
]
"""Config value of an order: see `read_order`."""
