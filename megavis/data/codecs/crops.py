"""Crop, resize, mirror and shift images.

All functions are deterministic: random numbers are arguments, so every rank, worker and resumed run
gets the same pixels.

Legend: h and w, height and width of an image in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megavis.data.codecs.label_maps import nearest

if TYPE_CHECKING:
    from torch import Tensor

NUM_WINDOW_DRAWS = 40
"""Uniform draws of `random_window`: four for each of its ten attempts."""
NUM_INCEPTION_DRAWS = 400
"""Uniform draws of `inception_window`: four for each of its hundred attempts."""
_DRAWS_AN_ATTEMPT = 4
PADDING = (124, 116, 104)
"""ImageNet's mean colour, beyond the end of an image."""
Smoothing = Literal["bicubic", "bilinear"]
_SHIFT = 4
"""Largest shift in pixels."""


class WrongSizeError(ValueError):
    """The image has the wrong size for a transform without a resize."""


@dataclass(frozen=True)
class Window:
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def shift(
    image: np.ndarray, draws: np.ndarray, *, border: Literal["reflect", "zeros"] = "reflect"
) -> np.ndarray:
    """Pad by 4 pixels on each side and take a random crop of the original size.

    With reflection padding this is the augmentation of Wide Residual Networks (Zagoruyko and
    Komodakis), which iGPT uses to fine-tune on CIFAR (section 3.1); with zeros, DeiT's code
    for images of 32².

    Args:
        image: `[h, w]` or `[h, w, 3]`, each side above 4.
        draws: `[2]` in [0, 1): vertical and horizontal position.
    """
    height, width = image.shape[:2]
    widths = [(_SHIFT, _SHIFT)] * 2 + [(0, 0)] * (image.ndim - 2)
    top, left = (math.floor(draw * (2 * _SHIFT + 1)) for draw in draws.tolist())
    padded = np.pad(image, widths, mode="reflect" if border == "reflect" else "constant")
    return cut(padded, Window(top, left, height, width))


def random_window(
    height: int,
    width: int,
    draws: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Window:
    """Return the window of a random resized crop, as in MAE's recipe.

    The fraction of the area is uniform in `scale`, the logarithm of width / height uniform between
    the logarithms of `ratio`. After ten windows that do not fit, the largest centered one with an
    allowed ratio is returned.

    Args:
        draws: `[40]` in [0, 1): four per attempt (area, ratio, top, left).
        scale: smallest and largest fraction of the area.
        ratio: smallest and largest width / height.
    """
    logarithms = (math.log(ratio[0]), math.log(ratio[1]))
    for area, shape, top, left in draws.reshape(-1, _DRAWS_AN_ATTEMPT).tolist():
        target = height * width * _between(area, scale)
        proportion = math.exp(_between(shape, logarithms))
        window_width = round(math.sqrt(target * proportion))
        window_height = round(math.sqrt(target / proportion))
        if 0 < window_width <= width and 0 < window_height <= height:
            first_row = math.floor(top * (height - window_height + 1))
            first_column = math.floor(left * (width - window_width + 1))
            return Window(first_row, first_column, window_height, window_width)
    window_width = min(width, max(1, round(height * ratio[1])))
    window_height = min(height, max(1, round(width / ratio[0])))
    top_left = ((height - window_height) // 2, (width - window_width) // 2)
    return Window(*top_left, window_height, window_width)


def inception_window(
    height: int,
    width: int,
    draws: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Window:
    """Return the window of TensorFlow's `sample_distorted_bounding_box` without boxes.

    This is the crop of big_vision, and therefore of GIVT and UViM. Unlike in `random_window`, width
    / height itself is uniform, the height is uniform among those with an allowed area, and after a
    hundred attempts the window is the whole image: no square has 80 % of the area of a 4:3
    photograph, so with a ratio of 1 the whole photograph is squeezed into the square.

    Args:
        draws: `[400]` in [0, 1): four per attempt (ratio, height, top, left).
        scale: smallest and largest fraction of the area.
        ratio: smallest and largest width / height.
    """
    # In float32, like the op: 0.8 · 500 · 400 must not exceed 160,000.
    areas = [float(np.float32(share) * np.float32(width) * np.float32(height)) for share in scale]
    # A hundred attempts take longer than decoding a photograph, and most of GIVT's would fail.
    if _largest_area(height, width, ratio) >= areas[0]:
        for proportion, *places in draws.reshape(-1, _DRAWS_AN_ATTEMPT).tolist():
            shape = _between(proportion, ratio)
            window = _inception_attempt(height, width, places, shape=shape, areas=areas)
            if window is not None:
                return window
    return Window(0, 0, height, width)


def _largest_area(height: int, width: int, ratio: tuple[float, float]) -> float:
    """Return a bound on the areas of windows, which may be half a pixel wider than their ratio."""
    nearest = min(max(width / height, ratio[0]), ratio[1])
    return min(height, (width + 0.5) / nearest) * min(width, height * nearest + 0.5)


def _inception_attempt(
    height: int, width: int, draws: Sequence[float], *, shape: float, areas: Sequence[float]
) -> Window | None:
    """Return a window of width / height `shape`; None if it misses the areas or the image."""
    lowest, highest = (round(math.sqrt(area / shape)) for area in areas)
    # The op's own correction, with its epsilon: the largest height whose rounded width still fits.
    if round(highest * shape) > width:
        highest = int((width + 0.5 - 1e-7) / shape)
        highest -= round(highest * shape) > width
    highest = min(highest, height)
    lowest = min(lowest, highest)
    window_height = lowest + math.floor(draws[0] * (highest - lowest + 1))
    # Rounding may miss the areas by a pixel.
    window_height += round(window_height * shape) * window_height < areas[0]
    window_height -= round(window_height * shape) * window_height > areas[1]
    window_width = round(window_height * shape)
    fits = 0 < window_width <= width and 0 < window_height <= height
    if not fits or not areas[0] <= window_width * window_height <= areas[1]:
        return None
    # As in the op, the last position is never drawn.
    top = math.floor(draws[1] * (height - window_height))
    left = math.floor(draws[2] * (width - window_width))
    return Window(top, left, window_height, window_width)


def square_window(height: int, width: int, draws: np.ndarray | None = None, *, size: int) -> Window:
    """Return a random or centered square window with sides of `size` pixels.

    Draws `[2]` in [0, 1) are the vertical and horizontal position; without any it is centered.

    Raises:
        WrongSizeError: the image is smaller than the square.
    """
    spaces = (height - size, width - size)
    if min(spaces) < 0:
        raise WrongSizeError(f"smaller than {size}x{size} pixels")
    if draws is not None and draws.size:
        top, left = (
            math.floor(draw * (space + 1))
            for draw, space in zip(draws.tolist(), spaces, strict=True)
        )
    else:
        top, left = (space // 2 for space in spaces)
    return Window(top, left, size, size)


def cut_scaled(
    image: np.ndarray, draws: np.ndarray, *, short_sides: tuple[int, int], size: int
) -> np.ndarray:
    """Resize the shorter side to a random length and crop a random square: uint8 `[size, size, 3]`.

    This is iGPT's augmentation for ImageNet (section 3.1).

    Args:
        image: uint8 `[h, w, 3]`.
        draws: `[3]` in [0, 1): length, vertical and horizontal position.
        short_sides: smallest and largest length, at least `size`.
    """
    smallest, largest = short_sides
    length = smallest + math.floor(draws[0] * (largest - smallest + 1))
    image = _scale(image, length)
    height, width = image.shape[:2]
    return cut(image, square_window(height, width, draws[1:], size=size))


def cut_jittered(
    image: np.ndarray,
    draws: np.ndarray,
    *,
    factors: tuple[float, float],
    size: int,
    is_map: bool,
    smoothing: Smoothing,
    fits: bool = False,
) -> np.ndarray:
    """Resize by a random factor and cut a random square, padded where the image ends.

    "Simple Copy-Paste is a Strong Data Augmentation Method for Instance Segmentation" (Ghiasi et
    al., 2021) calls this large-scale jittering.

    Args:
        image: uint8 `[h, w, 3]`, or `[h, w, n]` for maps.
        draws: `[3]` in [0, 1): factor, vertical and horizontal position.
        factors: smallest and largest length of the shorter side, relative to `size`.
        is_map: resize to the nearest pixel, and pad with 0, which is void, instead of `PADDING`.
        fits: factors apply to the longer side.

    Returns:
        uint8 `[size, size, ...]`.
    """
    height, width = image.shape[:2]
    factor = factors[0] + draws[0] * (factors[1] - factors[0])
    side = max(height, width) if fits else min(height, width)
    scale = size * factor / side
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    if is_map:
        resized = nearest(image, height=height, width=width)
    else:
        resized = resize(image, height=height, width=width, smoothing=smoothing)
    top = math.floor(draws[1] * (max(0, height - size) + 1))
    left = math.floor(draws[2] * (max(0, width - size) + 1))
    part = resized[top : top + size, left : left + size]
    if part.shape[:2] == (size, size):
        return part
    whole = np.empty((size, size, *image.shape[2:]), np.uint8)
    whole[:] = 0 if is_map else PADDING
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def cut_center(image: np.ndarray, *, short_side: int, size: int) -> np.ndarray:
    """Resize the shorter side to `short_side` and crop the center: uint8 `[size, size, 3]`.

    The longer side becomes round(longer · short_side / shorter); the crop starts at
    floor((side - size) / 2).
    """
    image = _scale(image, short_side)
    height, width = image.shape[:2]
    return cut(image, square_window(height, width, size=size))


def _scale(image: np.ndarray, short_side: int) -> np.ndarray:
    """Resize uint8 `[h, w, 3]` to a shorter side of `short_side`."""
    height, width = scaled_size(image, short_side)
    return resize(image, height=height, width=width)


def scaled_size(image: np.ndarray, short_side: int) -> tuple[int, int]:
    """Return height and width of an image for a shorter side of `short_side`."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    return round(height * short_side / shorter), round(width * short_side / shorter)


def cut(image: np.ndarray, window: Window) -> np.ndarray:
    """Return a view of a window of an image `[h, w, 3]`."""
    rows = slice(window.top, window.top + window.height)
    return image[rows, window.left : window.left + window.width]


def resize(
    image: np.ndarray, *, height: int, width: int, smoothing: Smoothing = "bicubic"
) -> np.ndarray:
    """Resize uint8 `[h, w, 3]` to `[height, width, 3]`: bicubic, antialiased; or bilinear.

    torch's filter is several times faster than Pillow's; a few bytes in a thousand differ, by one
    or two. Bilinear is not antialiased, as in UViM's released code.
    """
    if image.shape[:2] == (height, width):
        return image
    from torch.nn import functional as F

    pixels = _as_batch(image)
    smooths = smoothing == "bicubic"
    resized = F.interpolate(pixels, size=(height, width), mode=smoothing, antialias=smooths)
    return resized[0].permute(1, 2, 0).numpy()


def mirror(image: np.ndarray) -> np.ndarray:
    """Flip an image `[h, w]` or `[h, w, 3]` of any dtype horizontally."""
    if image.ndim == 2:
        return image[:, ::-1]
    # numpy takes seven times as long to copy flipped three-byte pixels.
    return _as_batch(image).flip(-1)[0].permute(1, 2, 0).numpy()


def _as_batch(image: np.ndarray) -> Tensor:
    """Return a view of `[h, w, 3]` as `[1, 3, h, w]` in channels-last memory format."""
    # Imported here, so that tools that only list or write shards start without torch.
    import torch

    # Add the batch dimension first: after a permute, torch would not recognize channels-last and
    # would leave its fast path for bytes.
    return torch.from_numpy(image)[None].permute(0, 3, 1, 2)


def _between(draw: float, limits: tuple[float, float]) -> float:
    return limits[0] + draw * (limits[1] - limits[0])
