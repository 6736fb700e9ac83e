"""Label maps as pixels: classes and segments, or depths, in the three bytes of a PNG.

A pixel of a map is one number, R + 256 G + 65536 B, the form of COCO's panoptic maps. In shards a
panoptic map holds R, the class from 1 on (0: void); G, the segment from 1 on (0: void); B, 1 in a
crowd. A depth map holds tenths of a millimetre, 0 where nothing was measured.

Legend: h and w, height and width of a map in pixels, s segments.
"""

from __future__ import annotations

import colorsys
from typing import Literal

import numpy as np

TargetKind = Literal["panoptic", "depth"]
"""What the target of a pair shows, besides colours."""

UNITS_A_METRE = 10_000
"""Depths are stored in tenths of a millimetre."""
MAX_SEGMENTS = 255
MAX_NUMBER = (1 << 24) - 1
_GOLDEN_RATIO = 0.618033988749895
_DARKENED = 4.0
"""Metres at which a painted depth has half of the brightness."""


def to_numbers(pixels: np.ndarray) -> np.ndarray:
    """Return int32 `[..., h, w]` of pixels uint8 `[..., h, w, 3]`."""
    wide = pixels.astype(np.int32)
    return wide[..., 0] + 256 * wide[..., 1] + 65536 * wide[..., 2]


def to_pixels(numbers: np.ndarray) -> np.ndarray:
    """Return pixels uint8 `[..., h, w, 3]` of numbers `[..., h, w]` in 0 .. 2²⁴ - 1."""
    parts = [numbers & 255, (numbers >> 8) & 255, (numbers >> 16) & 255]
    return np.stack(parts, axis=-1).astype(np.uint8)


def nearest(pixels: np.ndarray, *, height: int, width: int) -> np.ndarray:
    """Resize `[h, w, ...]`; every pixel is the one whose area holds the new pixel's centre."""
    places = [
        (np.arange(new) + 0.5) * old // new
        for new, old in zip((height, width), pixels.shape[:2], strict=True)
    ]
    rows, columns = (place.astype(np.int64) for place in places)
    return pixels[rows[:, None], columns]


def renumbered(pixels: np.ndarray) -> np.ndarray:
    """Number the segments of a panoptic map anew, from 1 on by their centres of mass.

    The vertical place decides, and between equal ones the horizontal, as in UViM's released code:
    numbers after a crop follow from what the crop shows.

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
    """Return maps `[..., h, w, 3]` as pictures for people, uint8 alike.

    Panoptic: a hue for each class, and a brightness for each of its segments; void is black.
    Depth: the nearer the brighter; what was not measured is black.
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
    return table[pixels[..., 0], pixels[..., 1] * 3 % 8]
