"""Resize images to squares: bicubic, antialiased, by torch or by Pillow.

torch is several times faster; a few values in a thousand differ from Pillow's, by one. Its bytes do
not depend on the processor, and one image is resized by one thread. It is imported with the first
image that is resized, which takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from data_tools.decode import MAX_PIXELS, RefusedImageError, decoder_versions
from data_tools.user_text import whole_number
from megavis.config.arguments import positive
from megavis.config.errors import UserError
from megavis.data.codecs.crops import (
    NUM_INCEPTION_DRAWS,
    Window,
    cut,
    inception_window,
    resize,
    scaled_size,
    square_window,
)

Library = Literal["torch", "pillow"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
_NAMES = {"torch": "torch", "pillow": "Pillow"}
MAX_SIDE = math.isqrt(MAX_PIXELS)
"""Side of the largest square that is read again."""
side = whole_number(1, MAX_SIDE)
"""Parses the side of squares to write."""
CROP = "shorter side to image_size, then centre crop"
# The paper's preparation of ImageNet: Generative Pretraining from Pixels, section 3.1.
_PAPER_SIDE = 224
_PAPER_SHORTER_SIDES = (256, 384)
_AREAS = (0.8, 1.0)  # GIVT, appendix C.2
_SQUARE = (1.0, 1.0)
_MAX_ASPECT = 64

CropKind = Literal["center", "evaluation", "random", "inception"]


@dataclass(frozen=True)
class Crop:
    """Square crops to keep of each image.

    Attributes:
        kind: `center`: resize the shorter side to the stored size, crop the center. `evaluation`:
            resize the shorter side to 224, crop the center of 224, resize. `random`: resize the
            shorter side to a random length in [256, 384], crop a random square of 224, resize.
            `inception`: a random window of 80 % to 100 % of the area, or the whole image if none
            fits (`inception_window`), resized.
        count: random crops stored per image.
        seed: seed of the random crops, which depend only on it and the image's name.
        aspect: smallest and largest width / height of `inception`; 1 in GIVT's released code.
        library: library that resizes.
    """

    kind: CropKind = "center"
    count: int = 1
    seed: int = 0
    aspect: tuple[float, float] = _SQUARE
    library: Library = "torch"

    def __str__(self) -> str:
        if self.kind == "center":
            return CROP
        shorter, longer = _PAPER_SHORTER_SIDES
        large = _PAPER_SIDE
        if self.kind == "evaluation":
            return f"shorter side to {large}, centre crop of {large}, then to image_size"
        what = (
            f"shorter side to a random length in [{shorter}, {longer}], random crop of {large}"
            if self.kind == "random"
            else f"random part of {_AREAS[0]:.0%} to {_AREAS[1]:.0%} of the area, width / height"
            f" {self.aspect[0]:g} to {self.aspect[1]:g}, or the whole image"
        )
        return f"{self.count} times: {what}, then to image_size; seed {self.seed}"

    def side_before(self, size: int) -> int:
        """Return the least shorter side after the first resize, which decoding must provide."""
        paper = {"evaluation": _PAPER_SIDE, "random": _PAPER_SHORTER_SIDES[1]}
        return paper.get(self.kind, size)

    def squares(
        self, image: np.ndarray, *, sizes: tuple[int, ...], name: str
    ) -> list[list[np.ndarray]]:
        """Return, for each size, the squares uint8 `[size, size, 3]` of `image` `[h, w, 3]`.

        Random crops are seeded by `name` and are the same for every size. Raises RefusedImageError
        if one side is more than 64 times the other.
        """
        if self.kind == "center":
            return [[self._centre(image, size)] for size in sizes]
        if self.kind == "inception":
            parts = [self._random_part(image, name, number) for number in range(self.count)]
            return [[self._shrink(part, size) for part in parts] for size in sizes]
        if self.kind == "evaluation":
            large = [self._centre(image, _PAPER_SIDE)]
        else:
            large = [self._random_square(image, name, number) for number in range(self.count)]
        return [[self._shrink(square, size) for square in large] for size in sizes]

    def _centre(self, image: np.ndarray, size: int) -> np.ndarray:
        return resize_and_crop(image, size=size, library=self.library)

    def _shrink(self, part: np.ndarray, size: int) -> np.ndarray:
        return resized(part, height=size, width=size, library=self.library)

    def _random_square(self, image: np.ndarray, name: str, number: int) -> np.ndarray:
        random = self._random(name, number)
        shorter = int(random.integers(*_PAPER_SHORTER_SIDES, endpoint=True))
        height, width = _scaled_size(image, shorter)
        top = int(random.integers(0, height - _PAPER_SIDE, endpoint=True))
        left = int(random.integers(0, width - _PAPER_SIDE, endpoint=True))
        large = resized(image, height=height, width=width, library=self.library)
        return cut(large, Window(top, left, _PAPER_SIDE, _PAPER_SIDE))

    def _random_part(self, image: np.ndarray, name: str, number: int) -> np.ndarray:
        height, width = image.shape[:2]
        check_aspect(image)
        draws = self._random(name, number).random(NUM_INCEPTION_DRAWS)
        return cut(image, inception_window(height, width, draws, scale=_AREAS, ratio=self.aspect))

    def _random(self, name: str, number: int) -> np.random.Generator:
        text = f"{self.seed}\0{number}\0{name}".encode("utf-8", "surrogateescape")
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


def resize_name(library: Library) -> str:
    """Return the resize filter as manifests name it."""
    return f"{_NAMES[library]} bicubic (antialiased)"


def versions(library: Library | None) -> dict[str, str]:
    """Return the versions of the packages that affect pixels; without a resize, of decoders."""
    found = decoder_versions()
    return found if library != "torch" else {**found, "torch": version("torch").split("+")[0]}


def preparation(
    resize: str = "none", crop: str = "none", *, library: Library | None = None
) -> dict[str, Any]:
    """Return the manifest's record of how images are prepared."""
    return {"resize": resize, "crop": crop, "decoders": versions(library)}


def resize_and_crop(image: np.ndarray, *, size: int, library: Library) -> np.ndarray:
    """Resize the shorter side to `size`, crop the center: uint8 `[h, w, 3]` to `[size, size, 3]`.

    The longer side becomes round(longer * size / shorter); the crop starts at
    floor((longer - size) / 2). Smaller images are enlarged. Raises as `check_aspect`.
    """
    height, width = _scaled_size(image, size)
    large = resized(image, height=height, width=width, library=library)
    return cut(large, square_window(height, width, size=size))


def nearest_square(image: np.ndarray, *, size: int) -> np.ndarray:
    """Like `resize_and_crop`, but with nearest-neighbour resampling, by Pillow."""
    height, width = _scaled_size(image, size)
    large = Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST)
    return cut(np.asarray(large), square_window(height, width, size=size))


def _scaled_size(image: np.ndarray, shorter_side: int) -> tuple[int, int]:
    check_aspect(image)
    return scaled_size(image, shorter_side)


def check_aspect(image: np.ndarray) -> None:
    """Raise RefusedImageError if one side is more than 64 times the other.

    Scaled to a given shorter side, such an image could take gigabytes.
    """
    height, width = image.shape[:2]
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise RefusedImageError(f"aspect ratio above {_MAX_ASPECT}")


def resized(image: np.ndarray, *, height: int, width: int, library: Library) -> np.ndarray:
    """Resize uint8 `[h, w, 3]` to `[height, width, 3]`; return an image of that size as it is."""
    if image.shape[:2] == (height, width):
        return image
    if library == "pillow":
        large = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(large)
    # torch warns of arrays that cannot be written, which Pillow's decoders return.
    writable = image if image.flags.writeable else image.copy()
    return resize(writable, height=height, width=width)


def add_resize_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses the library."""
    parser.add_argument(
        "--resize",
        choices=LIBRARIES,
        default="torch",
        help="library that resizes: torch, several times faster, or Pillow; a few values in a "
        "thousand differ by one",
    )


def add_crop_arguments(parser: argparse.ArgumentParser, kinds: Sequence[CropKind]) -> None:
    """Add the options for `crop_from`."""
    descriptions = {
        "center": "shorter side to --size, center crop",
        "evaluation": "center 224 of shorter side 224, as iGPT's evaluation on ImageNet",
        "random": "224 of a shorter side in [256, 384], as iGPT's training",
        "inception": "a random 80 to 100 %% of the area, as GIVT's training",
    }
    parser.add_argument(
        "--crop",
        choices=kinds,
        default="center",
        help="; ".join(f"{kind}: {descriptions[kind]}" for kind in kinds),
    )
    parser.add_argument("--crops", type=positive, default=1, help="random crops stored per image")
    parser.add_argument(
        "--aspect",
        type=float,
        nargs=2,
        default=_SQUARE,
        metavar=("MIN", "MAX"),
        help="with --crop inception: width / height; default: 1 1, squares, or whole images where "
        "no square has 80 %% of the area",
    )
    add_resize_argument(parser)


def crop_from(arguments: argparse.Namespace) -> Crop:
    """Return the crop from the options. Raises UserError."""
    may_repeat = arguments.crop in ("random", "inception")
    if arguments.crops > 1 and not may_repeat:
        raise UserError("--crops: more than 1 only for random crops")
    aspect = tuple(arguments.aspect)
    if not 0 < aspect[0] <= aspect[1] < math.inf:
        raise UserError(
            "--aspect must be two numbers above 0, the smaller first, such as 0.75 1.33"
        )
    if aspect != _SQUARE and arguments.crop != "inception":
        raise UserError("--aspect needs --crop inception: other crops are squares")
    return Crop(arguments.crop, arguments.crops, arguments.seed, aspect, arguments.resize)
