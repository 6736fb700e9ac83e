"""Crop and flip an image as a function of its pixels, the seed and its position alone.

Training uses the crop of Masked Autoencoders Are Scalable Vision Learners (appendix A.1: random
resized crops and horizontal flips), evaluation the middle of the image. The position of a sample
in the endless stream drives every draw, so that any rank, worker and resume reads the same pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megavis.config.data import DataConfig
from megavis.data.codecs.augment import (
    NUM_AUGMENT_DRAWS,
    NUM_ERASING_DRAWS,
    RandAugment,
    RandomErasing,
)
from megavis.data.codecs.crops import (
    NUM_WINDOW_DRAWS,
    Smoothing,
    WrongSizeError,
    cut,
    cut_center,
    cut_scaled,
    mirror,
    random_window,
    resize,
    shift,
    square_window,
)
from megavis.data.codecs.label_maps import nearest

CropKind = Literal[
    "random_resized",
    "scaled",
    "window",
    "shifted",
    "center",
    "scaled_center",
    "middle",
    "whole",
    "none",
]

_CROP_DRAWS = {"random_resized": NUM_WINDOW_DRAWS, "scaled": 3, "window": 2, "shifted": 2}
"""Numbers that decide about a crop."""


@dataclass(frozen=True)
class Transform:
    """From a decoded image of any size to a square.

    Attributes:
        image_size: side of the square in pixels.
        crop: `random_resized`: a random part, resized; `scaled`: a random square of the image at
            a random scale, resized; `window`: a random square of the size, as it is stored;
            `shifted`: the image as it is stored, moved by up to 4 pixels either way; `center`: the
            middle, resized; `scaled_center`: the middle square of `crop_size`, which is the shorter
            side, resized; `middle`: the square of the size in the middle, as it is stored; `whole`:
            all of the image, resized whatever its shape; `none`: the image as it is stored.
            `shifted` and `none` need images of the size, `window` and `middle` none that are
            smaller.
        scale: smallest and largest share of the image's area that a random crop takes.
        ratio: smallest and largest width / height of a random crop.
        short_sides: smallest and largest length of the shorter side for `scaled`.
        crop_size: side of the squares of `scaled` and `scaled_center` before they are resized.
        short_side: what `center` resizes the shorter side to before it cuts; `image_size` when
            None.
        border: what `shifted` pads with.
        smoothing: how `random_resized` and `whole` resize: `bicubic`, antialiased, or `bilinear`
            between the four nearest pixels.
        flip: mirror every second image, at random.
        augment: what is done to the square after all that; nothing where None.
        erase: what is erased of it in the end; nothing where None.
        seed: of the draws.
    """

    image_size: int
    crop: CropKind = "none"
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    short_sides: tuple[int, int] = (256, 384)
    crop_size: int = 224
    short_side: int | None = None
    border: Literal["reflect", "zeros"] = "reflect"
    smoothing: Smoothing = "bicubic"
    flip: bool = False
    augment: RandAugment | None = None
    erase: RandomErasing | None = None
    seed: int = 0

    def flips(self, positions: np.ndarray) -> np.ndarray:
        """Return bool `[b]`: is the sample at each position int64 `[b]` mirrored?"""
        if not self.flip:
            return np.zeros(len(positions), bool)
        return _uniform(positions, 1, seed=self.seed, purpose="flip")[:, 0] < 0.5

    def draws(self, positions: np.ndarray) -> np.ndarray:
        """Return float64 `[b, d]` in [0, 1): all that chance decides for each sample.

        The first column is 1 for an image to mirror, else 0; then come those of the crop, of
        `augment` and of `erase`.
        """
        drawn = [
            _uniform(positions, count, seed=self.seed, purpose=purpose)
            for purpose, count in self._num_draws.items()
            if count
        ]
        return np.concatenate([self.flips(positions)[:, None], *drawn], axis=1, dtype=np.float64)

    @property
    def _num_draws(self) -> dict[str, int]:
        return {
            "crop": _CROP_DRAWS.get(self.crop, 0),
            "augment": 0 if self.augment is None else NUM_AUGMENT_DRAWS,
            "erase": 0 if self.erase is None else NUM_ERASING_DRAWS,
        }

    def __call__(self, image: np.ndarray, draws: np.ndarray, *, is_map: bool = False) -> np.ndarray:
        """Cut, resize and mirror one image.

        Args:
            image: uint8 `[h, w, 3]`; where nothing is resized any type, `[h, w]` too.
            draws: `[d]`, a row of `draws`.
            is_map: resize by taking the nearest pixel, so that no two labels are mixed.

        Returns:
            uint8 `[image_size, image_size, 3]`, or as the image.

        Raises:
            WrongSizeError: nothing is resized and the image has not the size, or is too small to
                cut a square out of it.
        """
        ends = np.cumsum([1, *self._num_draws.values()])
        of_crop, of_augment, of_erase = np.split(draws, ends)[1:4]
        part = self._part(image, of_crop)
        image = self._stored(image, of_crop) if part is None else self._resized(part, is_map)
        image = mirror(image) if draws[0] else image
        image = image if self.augment is None else self.augment(image, of_augment)
        return image if self.erase is None else self.erase(image, of_erase)

    def _part(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray | None:
        """Return the part that is resized to the square; None where nothing is resized."""
        size = self.crop_size
        height, width = image.shape[:2]
        if self.crop == "random_resized":
            window = random_window(height, width, draws, scale=self.scale, ratio=self.ratio)
            # Cut first: the filter must not look across the border of the crop.
            return cut(image, window)
        if self.crop == "whole":
            return image
        if self.crop == "scaled":
            return cut_scaled(image, draws, short_sides=self.short_sides, size=size)
        if self.crop == "scaled_center":
            return cut_center(image, short_side=size, size=size)
        if self.crop == "center":
            short_side = self.short_side or self.image_size
            return cut_center(image, short_side=short_side, size=self.image_size)
        return None

    def _resized(self, part: np.ndarray, is_map: bool) -> np.ndarray:
        side = self.image_size
        if is_map:
            return nearest(part, height=side, width=side)
        return resize(part, height=side, width=side, smoothing=self.smoothing)

    def _stored(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return pixels as they are stored."""
        height, width = image.shape[:2]
        size = self.image_size
        if self.crop in ("window", "middle"):
            return cut(image, square_window(height, width, draws, size=size))
        if (height, width) != (size, size):
            raise WrongSizeError(f"not {size}x{size} pixels")
        return shift(image, draws, border=self.border) if self.crop == "shifted" else image


def training_transform(config: DataConfig, *, seed: int) -> Transform:
    """Return what the `data` section asks for in training; `seed` is the run's."""
    return Transform(
        image_size=config.image_size,
        crop=config.crop,
        scale=config.scale,
        ratio=config.aspect,
        short_sides=config.short_sides,
        crop_size=config.crop_size,
        short_side=config.short_side,
        flip=config.flip,
        border=config.border,
        augment=None if config.rand_augment is None else RandAugment(*config.rand_augment),
        erase=RandomErasing(config.random_erasing) if config.random_erasing else None,
        seed=seed,
    )


def evaluation_transform(config: DataConfig) -> Transform:
    """Return the transform of held-out images: the middle where training crops at random."""
    middles: dict[CropKind, CropKind] = {
        "none": "none",
        "shifted": "none",
        "window": "middle",
        "scaled": "scaled_center",
    }
    return Transform(
        image_size=config.image_size,
        crop=middles.get(config.crop, "center"),
        crop_size=config.crop_size,
        short_side=config.short_side,
    )


def _uniform(positions: np.ndarray, count: int, *, seed: int, purpose: str) -> np.ndarray:
    """Draw float32 `[b, count]` in [0, 1) for positions int64 `[b]`."""
    import torch

    from megavis.parallel.random import uniform

    return uniform(torch.from_numpy(positions), count, seed=seed, purpose=purpose).numpy()
