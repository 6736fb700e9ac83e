"""RandAugment and Random Erasing, as deterministic functions of an image and given draws.

RandAugment follows "RandAugment: Practical automated data augmentation with a reduced search space"
(Cubuk et al.) in the form of MAE's fine-tuning recipe, "RandAug (9, 0.5)": magnitude 9 of 10, drawn
for each operation with a standard deviation of 0.5. Two operations are drawn, with replacement,
from fifteen whose effect grows with the magnitude; each is applied with probability 0.5. This is
timm's `rand-m9-mstd0.5-inc1`.

Random Erasing follows "Random Erasing Data Augmentation" (Zhong et al.) in the form of timm and
DeiT's recipe: one rectangle of 2 % to 33 % of the area, 0.3 to 3.3 times as high as wide, is filled
with normal noise of ImageNet's mean and standard deviation. timm erases after normalization; here
images are bytes, so noise is clipped to 0 .. 255.

Unlike in timm, random numbers are arguments, so every rank, worker and resumed run gets the same
pixels.

Legend: h and w, height and width of an image in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Image as Picture

from megavis.data.codecs.crops import PADDING

NUM_OPERATIONS = 2
"""Operations per image."""
_DRAWS_AN_OPERATION = 4
NUM_AUGMENT_DRAWS = NUM_OPERATIONS * _DRAWS_AN_OPERATION
"""Uniform draws per image."""
LARGEST_MAGNITUDE = 10.0

_PROBABILITY = 0.5
_FILL = PADDING
"""Fill colour behind a transformed image."""
_FILTER = Image.Resampling.BICUBIC
_SMALLEST_DRAW = 2.0**-25
"""Lower bound of a draw, half the step between two: the quantile of 0 is not finite."""

Operation = Callable[[Picture, float, float], Picture]
"""Maps an image, a strength in [0, 1] and a sign to an image of the same size."""
# Random Erasing.
_ATTEMPTS, _DRAWS_AN_ATTEMPT = 10, 4
NUM_ERASING_DRAWS = 2 + _ATTEMPTS * _DRAWS_AN_ATTEMPT
"""Uniform draws per image."""
NUM_COLOR_DRAWS = 9
"""Uniform draws per image."""
_AREAS = (0.02, 1 / 3)
_LOG_RATIOS = (math.log(0.3), math.log(1 / 0.3))
_MEAN = 255.0 * np.array((0.485, 0.456, 0.406))
_DEVIATION = 255.0 * np.array((0.229, 0.224, 0.225))
_SEEDS = 1 << 24
"""Draws are multiples of 1 / 2^24."""


@dataclass(frozen=True)
class ColorDistortion:
    """mmsegmentation's PhotoMetricDistortion, from the code of SSD (Liu et al., 2016).

    Each with probability 0.5: add up to 32 of 255, scale by 0.5 to 1.5 (before or after the next
    two), scale the saturation by 0.5 to 1.5, turn the hue by up to 18 of 180.
    """

    def __call__(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return uint8 `[h, w, 3]`.

        Draws `[NUM_COLOR_DRAWS]` in [0, 1) are, for brightness, contrast, saturation and hue,
        whether to change it and by how much; and whether contrast comes last.
        """
        amounts = [None if draws[i] >= 0.5 else float(draws[i + 1]) for i in range(0, 8, 2)]
        brightness, contrast, saturation, hue = amounts
        pixels = image.astype(np.float32)
        if brightness is not None:
            pixels = (pixels + 64.0 * brightness - 32.0).clip(0, 255)
        contrast_comes_last = draws[8] < 0.5
        if contrast is not None and not contrast_comes_last:
            pixels = (pixels * (0.5 + contrast)).clip(0, 255)
        if saturation is not None or hue is not None:
            pixels = _with_color(pixels, saturation, hue)
        if contrast is not None and contrast_comes_last:
            pixels = (pixels * (0.5 + contrast)).clip(0, 255)
        return np.rint(pixels).astype(np.uint8)


def _with_color(pixels: np.ndarray, saturation: float | None, hue: float | None) -> np.ndarray:
    """Scale the saturation and turn the hue of pixels in 0 .. 255, in Pillow's HSV of bytes."""
    picture = Image.fromarray(np.rint(pixels).astype(np.uint8)).convert("HSV")
    changed = np.asarray(picture).astype(np.float32)
    if saturation is not None:
        changed[..., 1] = (changed[..., 1] * (0.5 + saturation)).clip(0, 255)
    if hue is not None:
        # 18 of 180 is a tenth of the circle, which has 256 steps here.
        changed[..., 0] = (changed[..., 0] + 25.6 * (2.0 * hue - 1.0)) % 256.0
    turned = Image.fromarray(changed.astype(np.uint8), mode="HSV").convert("RGB")
    return np.asarray(turned).astype(np.float32)


@dataclass(frozen=True)
class RandAugment:
    """Apply randomly drawn operations to an image.

    Attributes:
        magnitude: mean strength, in [0, 10].
        deviation: standard deviation of the magnitude.
    """

    magnitude: float
    deviation: float

    def __call__(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Augment an image uint8 `[h, w, 3]`.

        Draws `[NUM_AUGMENT_DRAWS]` in [0, 1) are, for each operation, its index, whether it is
        applied, its strength and its sign.
        """
        picture = Image.fromarray(image)
        for which, whether, strength, sign in draws.reshape(-1, _DRAWS_AN_OPERATION).tolist():
            if whether < _PROBABILITY:
                operation = OPERATIONS[int(which * len(OPERATIONS))]
                picture = operation(picture, self._strength(strength), 1.0 if sign < 0.5 else -1.0)
        return np.asarray(picture)

    def _strength(self, draw: float) -> float:
        """Map a draw to a strength in [0, 1]."""
        normal = NormalDist().inv_cdf(max(draw, _SMALLEST_DRAW))
        magnitude = self.magnitude + self.deviation * normal
        return min(max(magnitude, 0.0), LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE


def _always(change: Callable[[Picture], Picture]) -> Operation:
    """Return an operation that ignores strength and sign."""
    return lambda image, strength, sign: change(image)


def _rotate(image: Picture, strength: float, sign: float) -> Picture:
    """Rotate by up to 30 degrees around the center."""
    return image.rotate(sign * strength * 30.0, resample=_FILTER, fillcolor=_FILL)


def _posterize(image: Picture, strength: float, sign: float) -> Picture:
    """Keep the top 4 to 1 bits of each value."""
    # At full strength timm keeps no bits, which newer versions of Pillow reject.
    return ImageOps.posterize(image, max(1, 4 - int(strength * 4)))


def _solarize(image: Picture, strength: float, sign: float) -> Picture:
    """Invert values above a threshold that falls from 256 to 0."""
    return ImageOps.solarize(image, 256 - int(strength * 256))


def _solarize_add(image: Picture, strength: float, sign: float) -> Picture:
    """Add up to 110 to values below 128."""
    added = int(strength * 110)
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _enhance(name: str) -> Operation:
    """Return a `PIL.ImageEnhance` operation with a factor in [0.1, 1.9]."""

    def enhance(image: Picture, strength: float, sign: float) -> Picture:
        factor = max(0.1, 1.0 + sign * strength * 0.9)
        return getattr(ImageEnhance, name)(image).enhance(factor)

    return enhance


def _move(*, shear: float = 0.0, shift: float = 0.0, along: int) -> Operation:
    """Return a shear or translation along an axis.

    Args:
        shear: largest shear, in columns per row (or rows per column).
        shift: largest translation, as a fraction of the width (or height).
        along: 0 for horizontal, 1 for vertical.
    """

    def move(image: Picture, strength: float, sign: float) -> Picture:
        matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        matrix[1 + 2 * along] = sign * strength * shear
        matrix[2 + 3 * along] = sign * strength * shift * image.size[along]
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix, resample=_FILTER, fillcolor=_FILL
        )

    return move


OPERATIONS: tuple[Operation, ...] = (
    _always(ImageOps.autocontrast),
    _always(ImageOps.equalize),
    _always(ImageOps.invert),
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _enhance("Color"),
    _enhance("Contrast"),
    _enhance("Brightness"),
    _enhance("Sharpness"),
    _move(shear=0.3, along=0),
    _move(shear=0.3, along=1),
    _move(shift=0.45, along=0),
    _move(shift=0.45, along=1),
)
"""The fifteen operations in timm's order."""


@dataclass(frozen=True)
class RandomErasing:
    """Replace a rectangle of some images by noise."""

    probability: float

    def __call__(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return uint8 `[h, w, 3]`: a copy, or the image itself if nothing is erased.

        Draws `[NUM_ERASING_DRAWS]` in [0, 1) are whether to erase, the noise seed, and for each
        attempt area, height / width, top and left.
        """
        if draws[0] >= self.probability:
            return image
        height, width = image.shape[:2]
        for area, ratio, top, left in draws[2:].reshape(-1, _DRAWS_AN_ATTEMPT).tolist():
            target = height * width * (_AREAS[0] + area * (_AREAS[1] - _AREAS[0]))
            shape = math.exp(_LOG_RATIOS[0] + ratio * (_LOG_RATIOS[1] - _LOG_RATIOS[0]))
            rows, columns = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
            # Strictly smaller, as in timm.
            if rows < height and columns < width:
                first_row = math.floor(top * (height - rows + 1))
                first_column = math.floor(left * (width - columns + 1))
                erased = image.copy()
                place = (
                    slice(first_row, first_row + rows),
                    slice(first_column, first_column + columns),
                )
                # How many values are needed depends on the rectangle, so one draw seeds them all.
                random = np.random.default_rng(int(draws[1] * _SEEDS))
                noise = _MEAN + _DEVIATION * random.standard_normal((rows, columns, 3))
                erased[place] = np.rint(noise).clip(0, 255).astype(np.uint8)
                return erased
        return image
