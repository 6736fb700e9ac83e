"""Random Erasing: a rectangle of an image becomes noise.

"Random Erasing Data Augmentation" (Zhong et al.), in the form that DeiT's recipe takes from timm:
one rectangle of 2 % to 33 % of the area, 0.3 to 3.3 times as high as wide; each of its pixels is
drawn from a normal distribution with ImageNet's means and deviations. timm puts the noise into
standardised numbers; here images are bytes, and what lies beyond 0 or 255 is cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_ATTEMPTS, _DRAWS_AN_ATTEMPT = 10, 4
NUM_DRAWS = 2 + _ATTEMPTS * _DRAWS_AN_ATTEMPT
"""Numbers in [0, 1) that decide about an image."""
_AREAS = (0.02, 1 / 3)
_LOG_RATIOS = (math.log(0.3), math.log(1 / 0.3))
_MEAN = 255.0 * np.array((0.485, 0.456, 0.406))
_DEVIATION = 255.0 * np.array((0.229, 0.224, 0.225))
_SEEDS = 1 << 24
"""Draws are multiples of 1 / 2^24."""


@dataclass(frozen=True)
class RandomErasing:
    """Erases a rectangle of some images.

    Attributes:
        probability: share of the images, in [0, 1].
    """

    probability: float

    def __call__(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return uint8 `[h, w, 3]`, the image itself where nothing is erased.

        Args:
            image: uint8 `[h, w, 3]`.
            draws: `[NUM_DRAWS]` in [0, 1): whether, the seed of the noise, and for each attempt
                area, height / width, top and left.
        """
        if draws[0] >= self.probability:
            return image
        height, width = image.shape[:2]
        for area, ratio, top, left in draws[2:].reshape(-1, _DRAWS_AN_ATTEMPT).tolist():
            target = height * width * (_AREAS[0] + area * (_AREAS[1] - _AREAS[0]))
            shape = math.exp(_LOG_RATIOS[0] + ratio * (_LOG_RATIOS[1] - _LOG_RATIOS[0]))
            rows, columns = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
            if rows < height and columns < width:
                first_row = math.floor(top * (height - rows + 1))
                first_column = math.floor(left * (width - columns + 1))
                erased = image.copy()
                place = (
                    slice(first_row, first_row + rows),
                    slice(first_column, first_column + columns),
                )
                erased[place] = _noise(rows, columns, seed=int(draws[1] * _SEEDS))
                return erased
        return image


def _noise(height: int, width: int, *, seed: int) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal((height, width, 3))
    return np.rint(_MEAN + _DEVIATION * normal).clip(0, 255).astype(np.uint8)
