"""Image transform of training and evaluation: crop, flip and augmentation.

By default training uses the random resized crops and horizontal flips of "Masked Autoencoders Are
Scalable Vision Learners" (appendix A.1), and evaluation uses center crops. Every draw is a function
of the seed and the sample's position in the endless stream, so every rank, worker and resumed run
reads the same pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megavis.config.section import DataConfig, SourceCrop
from megavis.data.codecs.augment import (
    NUM_AUGMENT_DRAWS,
    NUM_COLOR_DRAWS,
    NUM_ERASING_DRAWS,
    ColorDistortion,
    RandAugment,
    RandomErasing,
)
from megavis.data.codecs.crops import (
    NUM_INCEPTION_DRAWS,
    NUM_WINDOW_DRAWS,
    Smoothing,
    WrongSizeError,
    cut,
    cut_center,
    cut_jittered,
    cut_scaled,
    inception_window,
    mirror,
    random_window,
    resize,
    shift,
    square_window,
)
from megavis.data.codecs.label_maps import nearest

if TYPE_CHECKING:
    from megavis.data.codecs.sound import SoundAugment

CropKind = Literal[
    "random_resized",
    "inception",
    "scaled",
    "jittered",
    "fitted",
    "window",
    "shifted",
    "center",
    "scaled_center",
    "middle",
    "whole",
    "none",
]

_CROP_DRAWS = {
    "random_resized": NUM_WINDOW_DRAWS,
    "inception": NUM_INCEPTION_DRAWS,
    "scaled": 3,
    "jittered": 3,
    "window": 2,
    "shifted": 2,
}
"""Uniform draws per crop."""
_HELD_OUT: dict[CropKind, CropKind] = {
    "none": "none",
    "shifted": "none",
    "window": "middle",
    "scaled": "scaled_center",
    "jittered": "fitted",
}
"""Crops of held-out images instead of training's; `center` for all others."""


@dataclass(frozen=True)
class Transform:
    """Maps a decoded image of any size to a square.

    Attributes:
        image_size: side of the square in pixels.
        crop: `random_resized`: a random window, resized; `inception`: the same by TensorFlow's
            rule; `scaled`: resize to a random scale, crop a random square, resize; `window`: a
            random square without a resize; `shifted`: the stored image, shifted by up to 4 pixels
            in each direction; `center`: resize, crop the center; `scaled_center`: resize the
            shorter side to `crop_size`, crop the center, resize; `middle`: the center square
            without a resize; `jittered`: resize by a random factor of `jitter` and cut a random
            square, padded where the image ends; `fitted`: the same by 1, at the center; `whole`:
            the whole image, resized without regard to its aspect ratio; `none`: the stored image.
            `shifted` and `none` need images of `image_size`, `window` and `middle` images that are
            no smaller.
        scale: smallest and largest fraction of the area that a random window covers.
        ratio: smallest and largest width / height of a random window.
        short_sides: smallest and largest length of the shorter side for `scaled`.
        jitter: smallest and largest length of the shorter side for `jittered`, in multiples of
            `image_size`.
        fits: `jitter`, and the 1 of `fitted`, apply to the longer side instead.
        crop_size: side of the squares of `scaled` and `scaled_center` before the last resize.
        short_side: length of the shorter side from which `center` crops; defaults to
            `image_size`.
        border: padding mode of `shifted`.
        smoothing: resize filter of random windows and `whole`: `bicubic`, antialiased, or
            `bilinear`, not antialiased.
        flip: flip horizontally with probability 0.5.
        augment: applied after crop and flip, if given.
        colors: applied after these to images, not to label maps, if given.
        erase: applied last, if given.
        sound: augments recordings, if given.
    """

    image_size: int
    crop: CropKind = "none"
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    short_sides: tuple[int, int] = (256, 384)
    jitter: tuple[float, float] = (0.5, 2.0)
    fits: bool = False
    crop_size: int = 224
    short_side: int | None = None
    border: Literal["reflect", "zeros"] = "reflect"
    smoothing: Smoothing = "bicubic"
    flip: bool = False
    augment: RandAugment | None = None
    colors: ColorDistortion | None = None
    erase: RandomErasing | None = None
    sound: SoundAugment | None = None
    seed: int = 0

    def flips(self, positions: np.ndarray) -> np.ndarray:
        """Return bool `[b]`: whether the sample at each position, int64 `[b]`, is flipped."""
        if not self.flip:
            return np.zeros(len(positions), bool)
        return _uniform(positions, 1, seed=self.seed, purpose="flip")[:, 0] < 0.5

    def sound_draws(self, positions: np.ndarray, count: int) -> np.ndarray:
        """Return the random numbers of `sound` at positions, float64 `[b, count]` in [0, 1)."""
        return _uniform(positions, count, seed=self.seed, purpose="sound")

    def draws(self, positions: np.ndarray) -> np.ndarray:
        """Return all random numbers of each sample, float64 `[b, d]` in [0, 1].

        The first column is 1 if the image is flipped, else 0, followed by the columns of the crop,
        `augment`, `erase` and `colors`.
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
            "colors": 0 if self.colors is None else NUM_COLOR_DRAWS,
        }

    def __call__(self, image: np.ndarray, draws: np.ndarray, *, is_map: bool = False) -> np.ndarray:
        """Crop, resize, flip and augment one image.

        Args:
            image: uint8 `[h, w, 3]`, or `[h, w, n]` for maps; without a resize, `[h, w]` and other
                dtypes too.
            draws: `[d]`, a row of `draws`.
            is_map: resize to the nearest pixel, so that labels are not mixed.

        Returns:
            uint8 `[image_size, image_size, ...]`, or the shape and dtype of the image.

        Raises:
            WrongSizeError: the crop does not resize, and the image has the wrong size.
        """
        ends = np.cumsum([1, *self._num_draws.values()])
        crop_draws, augment_draws, erase_draws, color_draws = np.split(draws, ends)[1:5]
        if self.crop in ("jittered", "fitted"):
            image = self._jittered(image, crop_draws, is_map)
        else:
            part = self._part_to_resize(image, crop_draws)
            if part is None:
                image = self._crop_stored(image, crop_draws)
            else:
                image = self._resize(part, is_map)
        image = mirror(image) if draws[0] else image
        image = image if self.augment is None else self.augment(image, augment_draws)
        if self.colors is not None and not is_map:
            image = self.colors(image, color_draws)
        return image if self.erase is None else self.erase(image, erase_draws)

    def _jittered(self, image: np.ndarray, draws: np.ndarray, is_map: bool) -> np.ndarray:
        factors = self.jitter
        if self.crop == "fitted":
            # The middle of the range of positions of the square.
            draws, factors = np.array([0.0, 0.5, 0.5]), (1.0, 1.0)
        return cut_jittered(
            image,
            draws,
            factors=factors,
            size=self.image_size,
            is_map=is_map,
            smoothing=self.smoothing,
            fits=self.fits,
        )

    def _part_to_resize(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray | None:
        """Return the part that is resized to the square; None if the crop does not resize."""
        size = self.crop_size
        height, width = image.shape[:2]
        if self.crop in ("random_resized", "inception"):
            draw = random_window if self.crop == "random_resized" else inception_window
            window = draw(height, width, draws, scale=self.scale, ratio=self.ratio)
            # Crop first: the filter must not see pixels outside the crop.
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

    def _resize(self, part: np.ndarray, is_map: bool) -> np.ndarray:
        side = self.image_size
        if is_map:
            return nearest(part, height=side, width=side)
        return resize(part, height=side, width=side, smoothing=self.smoothing)

    def _crop_stored(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Crop without a resize."""
        height, width = image.shape[:2]
        size = self.image_size
        if self.crop in ("window", "middle"):
            return cut(image, square_window(height, width, draws, size=size))
        if (height, width) != (size, size):
            raise WrongSizeError(f"not {size}x{size} pixels")
        return shift(image, draws, border=self.border) if self.crop == "shifted" else image


def training_transform(
    config: DataConfig, *, seed: int, crop: SourceCrop | None = None
) -> Transform:
    """Return a `data` section's training transform, or the one for a folder with its own crop.

    Raises:
        UserError: the noises are damaged.
    """
    own: CropKind = crop or config.crop
    if crop == "center" and config.crop == "scaled":
        own = _HELD_OUT["scaled"]
    sound = None
    if config.frames is not None:
        # Only recordings need SciPy.
        from megavis.data.codecs.sound import HOP, sound_augment

        num_samples = HOP * config.frames[0]
        sound = sound_augment(config.time_shift, config.background_noise, num_samples=num_samples)
    return Transform(
        image_size=config.image_size,
        crop=own,
        scale=config.scale,
        ratio=config.aspect,
        short_sides=config.short_sides,
        jitter=config.jitter,
        crop_size=config.crop_size,
        short_side=config.short_side,
        flip=config.flip,
        border=config.border,
        augment=None if config.rand_augment is None else RandAugment(*config.rand_augment),
        colors=ColorDistortion() if config.color_distortion else None,
        erase=RandomErasing(config.random_erasing) if config.random_erasing else None,
        sound=sound,
        seed=seed,
    )


def evaluation_transform(config: DataConfig) -> Transform:
    """Return the transform of held-out images: center crops instead of random ones."""
    return Transform(
        image_size=config.image_size,
        crop=_HELD_OUT.get(config.crop, "center"),
        crop_size=config.crop_size,
        short_side=config.short_side,
    )


def _uniform(positions: np.ndarray, count: int, *, seed: int, purpose: str) -> np.ndarray:
    """Draw float32 `[b, count]` in [0, 1) for positions int64 `[b]`."""
    import torch

    from megavis.parallel.random import uniform

    return uniform(torch.from_numpy(positions), count, seed=seed, purpose=purpose).numpy()
