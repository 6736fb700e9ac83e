"""Errors of predicted depths on NYU Depth v2, as in GIVT's released code.

Errors are computed per image over the pixels with a depth between 1 mm and 10 m, then averaged over
images.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.label_maps import UNITS_A_METRE, to_numbers

_MIN_DEPTH, _MAX_DEPTH = 1e-3, 10.0
"""In metres."""
_RATIO = 1.25


class DepthErrors:
    """Accumulates the errors of images."""

    def __init__(self) -> None:
        """Start without images."""
        self._rows: list[dict[str, float]] = []

    def add(self, truth: np.ndarray, predicted: np.ndarray) -> None:
        """Compare depth maps of the same size, uint8 `[h, w, 3]`, encoded as in shards.

        Images without a depth in range are left out.
        """
        true, guess = (to_numbers(pixels) / UNITS_A_METRE for pixels in (truth, predicted))
        counts = (true > _MIN_DEPTH) & (true < _MAX_DEPTH)
        if not counts.any():
            return
        true, guess = true[counts], np.maximum(guess[counts], 1.0 / UNITS_A_METRE)
        ratio = np.maximum(true / guess, guess / true)
        row = {
            "RMSE": np.sqrt(np.square(true - guess).mean()),
            "absRel": (np.abs(true - guess) / true).mean(),
            "log10": np.abs(np.log10(true) - np.log10(guess)).mean(),
        }
        row |= {f"delta{power}": (ratio < _RATIO**power).mean() for power in (1, 2, 3)}
        self._rows.append({name: float(value) for name, value in row.items()})

    def record(self) -> dict[str, float]:
        """Return the means over images; empty if there are none."""
        if not self._rows:
            return {}
        return {name: float(np.mean([row[name] for row in self._rows])) for name in self._rows[0]}
