"""What is cut out of an image when it is read: a function of its pixels, seed and position alone.

Training uses the crop of Masked Autoencoders Are Scalable Vision Learners (appendix A.1: random
resized crops and horizontal flips), evaluation the middle of the image. The position of a sample
in the endless stream drives every draw, so that any rank, worker and resume reads the same pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megavis.config.schema import DataConfig
from megavis.data.augment import NUM_DRAWS, RandAugment

if TYPE_CHECKING:
    from torch import Tensor

CropKind = Literal["random_resized", "window", "shifted", "center", "middle", "none"]

_ATTEMPTS = 10
_DRAWS_AN_ATTEMPT = 4
_SHIFT = 4
"""Pixels by which `shifted` moves an image at most."""
_CROP_DRAWS = {"random_resized": _ATTEMPTS * _DRAWS_AN_ATTEMPT, "window": 2, "shifted": 2}
"""Numbers that decide about a crop."""


class WrongSizeError(ValueError):
    """An image whose size does not fit a transform that changes none."""


@dataclass(frozen=True)
class Window:
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Transform:
    """From a decoded image of any size to a square.

    Attributes:
        image_size: side of the square in pixels.
        crop: `random_resized`: a random part, resized; `window`: a random square of the size, as
            it is stored; `shifted`: the image as it is stored, moved by up to 4 pixels either way;
            `center`: the middle, resized; `middle`: the square of the size in the middle, as it is
            stored; `none`: the image as it is stored. `shifted` and `none` want images of the
            size, `window` and `middle` none that are smaller.
        scale: smallest and largest share of the image's area that a random crop takes.
        ratio: smallest and largest width / height of a random crop.
        short_side: what `center` resizes the shorter side to before it cuts; `image_size` when
            None.
        flip: mirror every second image, at random.
        augment: what is done to the square after all that; nothing where None.
        seed: of the draws.
    """

    image_size: int
    crop: CropKind = "none"
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    short_side: int | None = None
    flip: bool = False
    augment: RandAugment | None = None
    seed: int = 0

    def flips(self, positions: np.ndarray) -> np.ndarray:
        """Return bool `[b]`: is the sample at each position int64 `[b]` mirrored?"""
        if not self.flip:
            return np.zeros(len(positions), bool)
        return _uniform(positions, 1, seed=self.seed, purpose="flip")[:, 0] < 0.5

    def draws(self, positions: np.ndarray) -> np.ndarray:
        """Return float64 `[b, d]` in [0, 1): all that chance decides for each sample.

        The first column is 1 for an image to mirror, else 0; then come those of the crop, then
        those of `augment`.
        """
        counts = {
            "crop": _CROP_DRAWS.get(self.crop, 0),
            "augment": 0 if self.augment is None else NUM_DRAWS,
        }
        drawn = [
            _uniform(positions, count, seed=self.seed, purpose=purpose)
            for purpose, count in counts.items()
            if count
        ]
        return np.concatenate([self.flips(positions)[:, None], *drawn], axis=1, dtype=np.float64)

    def __call__(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Cut, resize and mirror one image.

        Args:
            image: uint8 `[h, w, 3]`; where nothing is resized any type, `[h, w]` too.
            draws: `[d]`, a row of `draws`.

        Returns:
            uint8 `[image_size, image_size, 3]`, or as the image.

        Raises:
            WrongSizeError: nothing is resized and the image has not the size, or is too small to
                cut a square out of it.
        """
        height, width = image.shape[:2]
        size, of_crop = self.image_size, draws[1 : 1 + _CROP_DRAWS.get(self.crop, 0)]
        if self.crop == "random_resized":
            window = random_window(height, width, of_crop, scale=self.scale, ratio=self.ratio)
            # Cut first: the filter must not look across the border of the crop.
            image = resize(cut(image, window), height=size, width=size)
        elif self.crop == "center":
            image = cut_center(image, short_side=self.short_side or size, size=size)
        elif self.crop in ("window", "middle"):
            image = cut(image, square_window(height, width, of_crop, size=size))
        elif (height, width) != (size, size):
            raise WrongSizeError(f"not {size}x{size} pixels")
        elif self.crop == "shifted":
            image = shift(image, of_crop)
        image = mirror(image) if draws[0] else image
        return image if self.augment is None else self.augment(image, draws[-NUM_DRAWS:])


def shift(image: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Reflect 4 pixels on each side and cut the old size out at a random place.

    The augmentation of Wide Residual Networks (Zagoruyko and Komodakis), with which iGPT fine-tunes
    on CIFAR (section 3.1).

    Args:
        image: `[h, w]` or `[h, w, 3]`, each side above 4.
        draws: `[2]` in [0, 1): from the top and from the left.
    """
    height, width = image.shape[:2]
    border = [(_SHIFT, _SHIFT)] * 2 + [(0, 0)] * (image.ndim - 2)
    top, left = (math.floor(draw * (2 * _SHIFT + 1)) for draw in draws.tolist())
    return cut(np.pad(image, border, mode="reflect"), Window(top, left, height, width))


def random_window(
    height: int,
    width: int,
    draws: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Window:
    """Return a random part of an image, as the random resized crop of MAE's recipe has it.

    The part's share of the area is uniform in `scale`, the logarithm of width / height uniform
    between those of `ratio`. After ten parts that do not fit, the largest one in the middle whose
    ratio is allowed is taken.

    Args:
        height: of the image.
        width: of the image.
        draws: `[40]` in [0, 1): four an attempt (area, ratio, top, left).
        scale: smallest and largest share.
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


def square_window(height: int, width: int, draws: np.ndarray, *, size: int) -> Window:
    """Return a square of an image.

    Args:
        height: of the image.
        width: of the image.
        draws: `[2]` in [0, 1): from the top and from the left; or `[0]`, for the middle.
        size: side of the square.

    Raises:
        WrongSizeError: the image is smaller.
    """
    spaces = (height - size, width - size)
    if min(spaces) < 0:
        raise WrongSizeError(f"smaller than {size}x{size} pixels")
    if draws.size:
        top, left = (
            math.floor(draw * (space + 1))
            for draw, space in zip(draws.tolist(), spaces, strict=True)
        )
    else:
        top, left = (space // 2 for space in spaces)
    return Window(top, left, size, size)


def cut_center(image: np.ndarray, *, short_side: int, size: int) -> np.ndarray:
    """Resize the shorter side to `short_side` and cut the middle: uint8 `[size, size, 3]`.

    The longer side becomes round(longer · short_side / shorter); the cut begins at
    floor((side - size) / 2).
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    height, width = round(height * short_side / shorter), round(width * short_side / shorter)
    image = resize(image, height=height, width=width)
    return cut(image, Window((height - size) // 2, (width - size) // 2, size, size))


def cut(image: np.ndarray, window: Window) -> np.ndarray:
    """Return a view of a part of an image `[h, w, 3]`."""
    rows = slice(window.top, window.top + window.height)
    return image[rows, window.left : window.left + window.width]


def resize(image: np.ndarray, *, height: int, width: int) -> np.ndarray:
    """Resize uint8 `[h, w, 3]` to `[height, width, 3]`: bicubic, antialiased.

    torch's filter, several times faster than Pillow's; they differ by one or two in a few bytes of
    a thousand.
    """
    from torch.nn import functional as F

    if image.shape[:2] == (height, width):
        return image
    pixels = _as_batch(image)
    resized = F.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def mirror(image: np.ndarray) -> np.ndarray:
    """Return an image `[h, w]` or `[h, w, 3]` of any type with left and right exchanged."""
    if image.ndim == 2:
        return image[:, ::-1]
    # numpy takes seven times as long to copy pixels of three bytes in another order.
    return _as_batch(image).flip(-1)[0].permute(1, 2, 0).numpy()


def training_transform(config: DataConfig, *, seed: int) -> Transform:
    """Return what the `data` section asks for in training; `seed` is the run's."""
    return Transform(
        image_size=config.image_size,
        crop=config.crop,
        scale=config.scale,
        short_side=config.short_side,
        flip=config.flip,
        augment=None if config.rand_augment is None else RandAugment(*config.rand_augment),
        seed=seed,
    )


def evaluation_transform(config: DataConfig) -> Transform:
    """Return the transform of held-out images: the middle where training crops at random."""
    middles: dict[CropKind, CropKind] = {"none": "none", "shifted": "none", "window": "middle"}
    crop = middles.get(config.crop, "center")
    return Transform(image_size=config.image_size, crop=crop, short_side=config.short_side)


def _as_batch(image: np.ndarray) -> Tensor:
    """Return `[h, w, 3]` as `[1, 3, h, w]` with the channels last in memory, sharing it."""
    # Imported here: tools that only list or write shards start without torch.
    import torch

    # The batch dimension first: were it added to the permuted image, torch would not see that the
    # channels are last, and leave its fast path for bytes.
    return torch.from_numpy(image)[None].permute(0, 3, 1, 2)


def _uniform(positions: np.ndarray, count: int, *, seed: int, purpose: str) -> np.ndarray:
    """Draw float32 `[b, count]` in [0, 1) for positions int64 `[b]`."""
    import torch

    from megavis.parallel.random import uniform

    return uniform(torch.from_numpy(positions), count, seed=seed, purpose=purpose).numpy()


def _between(draw: float, limits: tuple[float, float]) -> float:
    return limits[0] + draw * (limits[1] - limits[0])
