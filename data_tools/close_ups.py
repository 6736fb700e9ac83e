"""Close-ups of a photograph: small squares, enlarged, all of one mean colour and one contrast.

What a network can learn from a few photographs about how colours go on from one patch to the next,
and not where in which photograph it is: there are too many close-ups to know them by heart, their
mean colour does not name the photograph, and none is flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from PIL import Image

_FLAT = 8.0
"""Deviation in grey levels under which a square is flat."""
_CONTRAST = 50.0
"""Deviation in grey levels that the liveliest channel of every close-up is given."""
_ATTEMPTS = 20
"""How often a flat square is drawn again."""


def cut_close_ups(
    region: Image.Image,
    *,
    count: int,
    size: int,
    seed: list[int],
    sides: tuple[int, int],
    turned: bool,
) -> Iterator[Image.Image]:
    """Yield random squares of a region, enlarged to `size`.

    Args:
        region: all that is seen of the photograph; shrunk for each square by a random power of √2
            that leaves room.
        count: of squares.
        size: side of what is yielded, in pixels.
        seed: of all draws.
        sides: smallest and largest side in pixels of the shrunk region; log-uniform between.
        turned: mirror and turn them by quarters at random: a detail has no up and down.
    """
    random = np.random.default_rng(seed)
    scales = _shrunk(region, side=sides[1])
    for _ in range(count):
        for _ in range(_ATTEMPTS):
            pixels = np.asarray(_square(scales, random, size=size, sides=sides), np.float32)
            if _deviation(pixels) >= _FLAT:
                break
        pixels = _of_one_contrast(pixels)
        if turned:
            pixels = np.rot90(pixels[:, :: int(random.choice((-1, 1)))], int(random.integers(4)))
        yield Image.fromarray(np.ascontiguousarray(pixels))


def _shrunk(image: Image.Image, *, side: int) -> list[Image.Image]:
    """Return the image and copies shrunk by √2, 2, 2√2 …, down to twice `side` at the shorter."""
    copies = [image]
    while min(copies[-1].size) >= 2 * math.sqrt(2) * side:
        shrink = 2 ** (len(copies) / 2)
        shape = (round(image.width / shrink), round(image.height / shrink))
        copies.append(image.resize(shape, Image.Resampling.BICUBIC))
    return copies


def _square(
    scales: list[Image.Image], random: np.random.Generator, *, size: int, sides: tuple[int, int]
) -> Image.Image:
    scale = scales[random.integers(len(scales))]
    side = math.exp(random.uniform(math.log(sides[0]), math.log(sides[1])))
    side = min(side, *scale.size)
    left, top = (random.uniform(0, length - side) for length in scale.size)
    # What is enlarged by itself is flat at its border, which gives a patch's position away: the
    # filter sees what lies around the square, but only inside the region.
    box = (left, top, left + side, top + side)
    return scale.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _deviation(pixels: np.ndarray) -> float:
    return float(np.max(pixels.std((0, 1))))


def _of_one_contrast(pixels: np.ndarray) -> np.ndarray:
    """Give float32 `[h, w, 3]` in [0, 255] a grey mean and its liveliest channel one deviation."""
    scale = _CONTRAST / max(_deviation(pixels), 1.0)
    moved = (pixels - pixels.mean((0, 1))) * scale + 127.5
    return moved.round().clip(0, 255).astype(np.uint8)
