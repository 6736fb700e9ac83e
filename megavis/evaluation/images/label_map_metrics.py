"""Metrics of label maps, encoded as in shards (`data/codecs/label_maps.py`).

Panoptic quality: "Panoptic Segmentation" (Kirillov et al., 2019), section 4.1; void and crowds are
treated as in the authors' code (panopticapi). Depth on NYU Depth v2, as in GIVT's released code:
errors are computed per image over the pixels with a depth between 1 mm and 10 m, then averaged over
images.

Legend: h and w, height and width of a map in pixels; c, number of classes including void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megavis.data.codecs.label_maps import UNITS_A_METRE, to_numbers

_MIN_DEPTH, _MAX_DEPTH = 1e-3, 10.0
"""In metres."""
_RATIO = 1.25


class PanopticQuality:
    """Accumulates matches over maps.

    Attributes:
        overlaps: float64 `[c]`, sums of the IoU of matched segments.
        matched: int64 `[c]`, true positives.
        spurious: int64 `[c]`, false positives.
        missed: int64 `[c]`, false negatives.
    """

    def __init__(self, num_classes: int) -> None:
        """Set up for classes 1 to `num_classes`."""
        self.overlaps = np.zeros(num_classes + 1)
        self.matched, self.spurious, self.missed = np.zeros((3, num_classes + 1), np.int64)

    def add(self, truth: np.ndarray, predicted: np.ndarray) -> None:
        """Compare a map with a prediction, uint8 `[h, w, 3]` each.

        Two segments of a class match if their IoU, whose union leaves out void pixels of the truth,
        is above 0.5; crowds never match. A predicted segment without a match is a false positive
        unless more than half of it is in void or in a crowd of its class.
        """
        segments = np.stack([_segments(truth), _segments(predicted)], axis=-1).reshape(-1, 2)
        pairs, counts = np.unique(segments, axis=0, return_counts=True)
        shared = {(int(a), int(b)): int(n) for (a, b), n in zip(pairs, counts, strict=True)}
        sizes: list[dict[int, int]] = [{}, {}]
        for pair, count in shared.items():
            for side, segment in zip(sizes, pair, strict=True):
                side[segment] = side.get(segment, 0) + count
        found = self._match(shared, *sizes)
        crowds = {}
        for segment in sorted(sizes[0].keys() - {0} - {a for a, _ in found}):
            if _is_crowd(segment):
                crowds[_class(segment)] = segment
            else:
                self.missed[_class(segment)] += 1
        for segment in sizes[1].keys() - {0} - {b for _, b in found}:
            crowd = crowds.get(_class(segment), -1)
            ignored = shared.get((0, segment), 0) + shared.get((crowd, segment), 0)
            if 2 * ignored <= sizes[1][segment]:
                self.spurious[_class(segment)] += 1

    def _match(
        self,
        shared: dict[tuple[int, int], int],
        true_sizes: dict[int, int],
        predicted_sizes: dict[int, int],
    ) -> list[tuple[int, int]]:
        found = []
        for (true, predicted), count in shared.items():
            if not true or not predicted or _is_crowd(true) or _class(true) != _class(predicted):
                continue
            void = shared.get((0, predicted), 0)
            union = true_sizes[true] + predicted_sizes[predicted] - count - void
            if 2 * count > union:
                self.overlaps[_class(true)] += count / union
                self.matched[_class(true)] += 1
                found.append((true, predicted))
        return found

    def quality(self, classes: Sequence[int] | None = None) -> Quality:
        """Return the means over `classes`, by default all; zeros if none of them occurs."""
        chosen = range(1, len(self.matched)) if classes is None else classes
        rows = []
        for number in chosen:
            hits = self.matched[number]
            weight = hits + 0.5 * self.spurious[number] + 0.5 * self.missed[number]
            if weight:
                overlap = self.overlaps[number]
                rows.append((overlap / weight, overlap / hits if hits else 0.0, hits / weight))
        if not rows:
            return Quality(0.0, 0.0, 0.0, 0)
        pq, sq, rq = np.mean(rows, axis=0).tolist()
        return Quality(pq, sq, rq, len(rows))


@dataclass(frozen=True)
class Quality:
    """Panoptic, segmentation and recognition quality: means over the classes that occur."""

    pq: float
    sq: float
    rq: float
    num_classes: int

    def record(self) -> dict[str, Any]:
        """Return the qualities in percent, and the number of classes."""
        parts = {"PQ": self.pq, "SQ": self.sq, "RQ": self.rq}
        return {**{name: 100.0 * part for name, part in parts.items()}, "classes": self.num_classes}


def _segments(pixels: np.ndarray) -> np.ndarray:
    """Return a number per segment, int64 `[h, w]`; 0 for void."""
    wide = pixels.astype(np.int64)
    numbers = wide[..., 0] + 256 * wide[..., 1] + 65536 * (wide[..., 2] > 0)
    return np.where(wide[..., 0] > 0, numbers, 0)


def _class(segment: int) -> int:
    return segment & 255


def _is_crowd(segment: int) -> bool:
    return segment >= 65536


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
