"""Label maps as pixels: classes and segments, or depths, in the three bytes of a PNG.

A pixel encodes one integer, R + 256 G + 65536 B, as in COCO's panoptic maps. In shards, R of a
panoptic map is the class, counted from 1 (0: void), G the segment, counted from 1 (0: void), and B
is 1 in a crowd. A depth map has depths in tenths of a millimetre, 0 for unknown depth.

Legend: h and w, height and width of a map in pixels, s segments.
"""

from __future__ import annotations

import colorsys
from typing import Literal

import numpy as np

TargetKind = Literal["panoptic", "depth"]
"""Kind of label map in the target of a pair."""

UNITS_A_METRE = 10_000
"""Depths are stored in tenths of a millimetre."""
MAX_SEGMENTS = 255
MAX_NUMBER = (1 << 24) - 1
_GOLDEN_RATIO = 0.618033988749895
_DARKENED = 4.0
"""Depth in metres that is painted at half brightness."""


def to_numbers(pixels: np.ndarray) -> np.ndarray:
    """Decode pixels uint8 `[..., h, w, 3]` to integers int32 `[..., h, w]`."""
    wide = pixels.astype(np.int32)
    return wide[..., 0] + 256 * wide[..., 1] + 65536 * wide[..., 2]


def to_pixels(numbers: np.ndarray) -> np.ndarray:
    """Encode integers `[..., h, w]` in 0 .. 2²⁴ - 1 as pixels uint8 `[..., h, w, 3]`."""
    parts = [numbers & 255, (numbers >> 8) & 255, (numbers >> 16) & 255]
    return np.stack(parts, axis=-1).astype(np.uint8)


def nearest(pixels: np.ndarray, *, height: int, width: int) -> np.ndarray:
    """Resize `[h, w, ...]` to the nearest pixels, by the centers of the new ones."""
    places = [
        (np.arange(new) + 0.5) * old // new
        for new, old in zip((height, width), pixels.shape[:2], strict=True)
    ]
    rows, columns = (place.astype(np.int64) for place in places)
    return pixels[rows[:, None], columns]


def renumbered(pixels: np.ndarray) -> np.ndarray:
    """Renumber the segments of a panoptic map from 1 in the order of their centers of mass.

    They are sorted by vertical, then horizontal position, as in UViM's released code, so numbers
    after a crop depend only on the crop.

    Args:
        pixels: uint8 `[h, w, 3]`; see the module.
    """
    segments = pixels[..., 1]
    height, width = segments.shape
    counts = np.bincount(segments.reshape(-1), minlength=MAX_SEGMENTS + 1).astype(np.float64)
    rows, columns = np.indices((height, width))
    down, right = (
        np.bincount(segments.reshape(-1), weights=place.reshape(-1), minlength=len(counts))
        for place in (rows, columns)
    )
    found = np.flatnonzero(counts[1:]) + 1
    centres = (height * down[found] + right[found]) / counts[found]
    numbers = np.zeros(len(counts), np.uint8)
    numbers[found[np.argsort(centres, kind="stable")]] = np.arange(1, len(found) + 1)
    changed = pixels.copy()
    changed[..., 1] = numbers[segments]
    return changed


def painted(pixels: np.ndarray, kind: TargetKind) -> np.ndarray:
    """Color maps `[..., h, w, 3]` for display; uint8 of the same shape.

    Panoptic maps get a hue per class and a brightness per segment; depth maps are brighter the
    nearer. Void and unknown depth are black.
    """
    if kind == "depth":
        metres = to_numbers(pixels) / UNITS_A_METRE
        grey = np.where(metres > 0, 255.0 * _DARKENED / (_DARKENED + metres), 0.0)
        return np.repeat(grey.round().astype(np.uint8)[..., None], 3, axis=-1)
    table = np.zeros((256, 8, 3), np.uint8)
    for number in range(1, 256):
        hue = number * _GOLDEN_RATIO % 1.0
        for shade in range(8):
            color = colorsys.hsv_to_rgb(hue, 0.45 + 0.05 * (shade % 4), 1.0 - 0.07 * shade)
            table[number, shade] = [round(255 * part) for part in color]
    # 3 has no factor in common with 8: consecutive segments get shades that are far apart.
    return table[pixels[..., 0], pixels[..., 1] * 3 % 8]
