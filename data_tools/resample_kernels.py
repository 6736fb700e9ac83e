"""The compiled loops of `resample.py`. Importing this file imports numba.

Pixels are four bytes. A block is 16 rows of an image turned on their side: its row x holds pixel x
of all 16, which is 64 neighbouring bytes, the lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ROWS = 16
LANES = 64
TAPS = 8  # summed at once; rows of weights have a multiple of this length
PRECISION = 22  # fractional bits of a weight: 32, less 8 for a pixel and 2 for overshoot
_HALF = 1 << (PRECISION - 1)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compile again in each process
        return numba.njit(nogil=True)(function)


@_compiled
def pass_across(
    pixels: np.ndarray,
    first_row: int,
    num_rows: int,
    starts: np.ndarray,
    weights: np.ndarray,
    end: int,
    out: np.ndarray,
    block: np.ndarray,
    lanes: np.ndarray,
) -> None:
    """Resize rows: uint32 `[h, w]` to uint8 `[num_rows, 4 * len(starts)]`.

    `block` uint32 `[reach, 16]` is scratch, and `lanes` its bytes, `[reach, 64]`.
    """
    sums = np.empty(LANES, np.int32)
    for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        _turn(pixels, first_row + row, rows, starts[0], end, block)
        for i in range(len(starts)):
            _weigh(lanes, starts[i], weights[i], sums)
            for r in range(rows):
                for c in range(4):
                    out[row + r, i * 4 + c] = sums[r * 4 + c]


@_compiled
def pass_down(rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """Resize columns: uint8 `[reach, n]` to `[len(starts), n]`."""
    sums = np.empty(out.shape[1], np.int32)
    for i in range(len(starts)):
        _weigh(rows, starts[i], weights[i], sums)
        for n in range(len(sums)):
            out[i, n] = sums[n]


@_compiled
def _turn(
    pixels: np.ndarray, first_row: int, rows: int, first: int, end: int, block: np.ndarray
) -> None:
    """Put pixels `[first, end)` of some rows into the columns of a block."""
    if rows == ROWS:  # a count that the compiler knows
        for x in range(first, end):
            for r in range(ROWS):
                block[x, r] = pixels[first_row + r, x]
    else:
        for x in range(first, end):
            for r in range(rows):
                block[x, r] = pixels[first_row + r, x]


@_compiled
def _weigh(lanes: np.ndarray, start: int, weights: np.ndarray, sums: np.ndarray) -> None:
    """Set `sums` to the weighted sum of rows of `lanes`, rounded to eight bits."""
    sums[:] = _HALF
    for tap in range(0, len(weights), TAPS):
        y = start + tap
        a, b, c, d = weights[tap], weights[tap + 1], weights[tap + 2], weights[tap + 3]
        e, f, g, h = weights[tap + 4], weights[tap + 5], weights[tap + 6], weights[tap + 7]
        for n in range(len(sums)):
            sums[n] += (
                (np.int32(lanes[y, n]) * a + np.int32(lanes[y + 1, n]) * b)
                + (np.int32(lanes[y + 2, n]) * c + np.int32(lanes[y + 3, n]) * d)
            ) + (
                (np.int32(lanes[y + 4, n]) * e + np.int32(lanes[y + 5, n]) * f)
                + (np.int32(lanes[y + 6, n]) * g + np.int32(lanes[y + 7, n]) * h)
            )
    for n in range(len(sums)):
        sums[n] = min(max(sums[n] >> PRECISION, 0), 255)
