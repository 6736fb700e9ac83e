"""Errors of predicted depths, means over images, as NYU Depth v2 is evaluated.

As in the released code of GIVT: pixels without a depth between 1 mm and 10 m do not count, and each
image counts alike.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.label_maps import UNITS_A_METRE, to_numbers

_RATIO = 1.25


class DepthErrors:
    """Collects the errors of images."""

    def __init__(self, *, min_depth: float = 1e-3, max_depth: float = 10.0) -> None:
        """Set up; only depths between the two, in metres, count."""
        self.min_depth, self.max_depth = min_depth, max_depth
        self._rows: list[dict[str, float]] = []

    def add(self, truth: np.ndarray, predicted: np.ndarray) -> None:
        """Compare depth maps of equal size, uint8 `[h, w, 3]` as in shards.

        A map without a pixel that counts is left out.
        """
        true, guess = (to_numbers(pixels) / UNITS_A_METRE for pixels in (truth, predicted))
        counts = (true > self.min_depth) & (true < self.max_depth)
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
        """Return the means over the images; nothing where there was none."""
        if not self._rows:
            return {}
        return {name: float(np.mean([row[name] for row in self._rows])) for name in self._rows[0]}
