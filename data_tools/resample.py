"""Pillow's antialiased bicubic resize, to the bit, several times faster.

Pillow resizes in two passes, first along rows, then along columns, and rounds to eight bits after
each. A pass is a weighted sum with integer weights of 22 fractional bits, so there is nothing to
approximate: the same integers give the same bytes. What makes it faster here:

- only the window that the crop keeps is computed;
- pixels have four bytes (red, green, blue, unused), so a block of 16 rows is turned on its side by
  moving whole pixels, and a pass then works on 64 neighbouring bytes with one weight;
- eight taps are summed at once.

The loops are compiled by numba. Pillow itself does the work, with the same bytes, where numba is
not installed, where its first answers differ from Pillow's, and for pictures whose height shrinks
much more than their width: these Pillow 13 resizes along columns first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image

from megavis.data.codecs.crops import Window

# As in the kernels, which are not imported here: numba takes half a second.
_PRECISION, _TAPS = 22, 8
_SUPPORT = 2.0  # of the bicubic filter, in output pixels


def resample(image: np.ndarray, *, height: int, width: int, window: Window) -> np.ndarray:
    """Resize to `height` x `width` and cut out `window`: uint8 `[h, w, 4]` to `[wh, ww, 4]`.

    The fourth byte of a pixel has no meaning, before and after. Equal to
    `PIL.Image.resize(..., BICUBIC).crop(...)` on the first three.
    """
    rows_first = image.shape[0] - height <= 2 * (image.shape[1] - width)
    kernels = trusted_kernels() if rows_first else None
    resize = _with_pillow if kernels is None else kernels.resize
    return resize(np.ascontiguousarray(image), height=height, width=width, window=window)


@functools.lru_cache(maxsize=1)
def trusted_kernels() -> Kernels | None:
    """Return the compiled loops; None without numba, or if they do not give Pillow's bytes here."""
    try:
        kernels = Kernels()
    except ImportError:  # not installed, or not for this version of numpy
        return None
    noise = np.random.default_rng(0).integers(0, 256, (75, 101, 4), dtype=np.uint8)
    for height, width in ((16, 21), (75, 90), (120, 161)):
        whole = Window(0, 0, height, width)
        ours = kernels.resize(noise, height=height, width=width, window=whole)
        expected = _with_pillow(noise, height=height, width=width, window=whole)
        if (ours[..., :3] != expected[..., :3]).any():
            return None
    return kernels


def with_fourth_channel(image: np.ndarray) -> np.ndarray:
    """Return uint8 `[h, w, 3]` as `[h, w, 4]`; the fourth byte is zero."""
    padded = np.zeros((*image.shape[:2], 4), np.uint8)
    padded[..., :3] = image
    return padded


@dataclass(frozen=True)
class Weights:
    """The weights of one pass.

    Attributes:
        starts: int64 `[count]`, the first input pixel of each output pixel.
        values: int32 `[count, taps]`, with 22 fractional bits; taps is a multiple of 8.
        first, end: the input pixels with a weight are `[first, end)`.
        reach: weights are zero-padded up to this pixel.
    """

    starts: np.ndarray
    values: np.ndarray
    first: int
    end: int
    reach: int


@functools.lru_cache(maxsize=256)
def pass_weights(size_in: int, size_out: int, *, start: int, count: int) -> Weights:
    """Return the weights of output pixels `[start, start + count)` of a resize.

    Output pixel i lies at (i + 0.5) size_in / size_out; the filter is stretched by
    size_in / size_out where that shrinks. Weights are normalised, then rounded half away from zero.
    """
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    centers = (np.arange(start, start + count) + 0.5) * scale
    support = _SUPPORT * stretch
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + support + 0.5).astype(np.int64), size_in)
    taps = -(-int((ends - starts).max()) // _TAPS) * _TAPS
    places = starts[:, None] + np.arange(taps)
    weights = _bicubic((places - centers[:, None] + 0.5) * (1.0 / stretch))
    weights[places >= ends[:, None]] = 0.0
    # cumsum adds one after the other, as Pillow does; sum() would round otherwise.
    weights /= weights.cumsum(axis=1)[:, -1:]
    scaled = weights * (1 << _PRECISION)
    values = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32)
    return Weights(starts, values, int(starts[0]), int(ends[-1]), int(starts[-1]) + taps)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic filter with a = -0.5, in Pillow's order of operations."""
    a = -0.5
    x = np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _with_pillow(image: np.ndarray, *, height: int, width: int, window: Window) -> np.ndarray:
    padded = Image.frombuffer("RGBX", (image.shape[1], image.shape[0]), image, "raw", "RGBX", 0, 1)
    resized = padded.resize((width, height), Image.Resampling.BICUBIC)
    right, bottom = window.left + window.width, window.top + window.height
    return np.asarray(resized.crop((window.left, window.top, right, bottom)))


class Kernels:
    """The compiled loops and their scratch memory, kept for all images of a process.

    Raises:
        ImportError: numba cannot be imported.
    """

    def __init__(self) -> None:
        from data_tools import resample_kernels

        self._loops = resample_kernels
        self._block = np.zeros((0, resample_kernels.ROWS), np.uint32)
        self._middle = np.zeros(0, np.uint8)

    def resize(self, image: np.ndarray, *, height: int, width: int, window: Window) -> np.ndarray:
        """Return the window uint8 `[wh, ww, 4]` of a contiguous uint8 `[h, w, 4]`; rows first."""
        across = pass_weights(image.shape[1], width, start=window.left, count=window.width)
        down = pass_weights(image.shape[0], height, start=window.top, count=window.height)
        middle = self._scratch(across, down)
        self._loops.pass_across(
            image.view(np.uint32)[..., 0],
            down.first,
            down.end - down.first,
            across.starts,
            across.values,
            across.end,
            middle,
            self._block,
            self._block.view(np.uint8),
        )
        out = np.empty((window.height, window.width * 4), np.uint8)
        self._loops.pass_down(middle, down.starts - down.first, down.values, out)
        return out.reshape(window.height, window.width, 4)

    def _scratch(self, across: Weights, down: Weights) -> np.ndarray:
        """Return what lies between the passes, uint8 `[rows, 4 ww]`, and enlarge the block.

        What an earlier image left in it only ever meets weights of zero.
        """
        if len(self._block) < across.reach:
            self._block = np.zeros((across.reach, self._loops.ROWS), np.uint32)
        size = (down.reach - down.first) * len(across.starts) * 4
        if len(self._middle) < size:
            self._middle = np.zeros(size, np.uint8)
        return self._middle[:size].reshape(-1, len(across.starts) * 4)
