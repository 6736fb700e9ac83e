"""`photographs`: crops of the photographs in two Python packages.

Each photograph is divided into regions with margins between them, so no pixel is in two: training,
validation, and selection (for a probe's layer). Every crop is inside one region. Class =
photograph.

Close-ups (`--sides`) are small squares, enlarged and normalized to one mean colour and contrast.
From them a network can learn how colours continue from patch to patch, but not the position in a
photograph: there are too many to memorize, their mean colour does not identify the photograph, and
none is flat.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.job_report import ProgressBar, say
from data_tools.made_folder import make_folder
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError
from megavis.data.codecs.crops import Window

RECORD_NAME = "photographs.json"
_SPLITS = ("train", "selection", "validation")
_STRIP_SHARE = 0.35
_SELECTION_SHARE = 0.4
_MARGIN = 16
# Indices of random streams.
_STREAMS = {"validation": 0, "train": 1, "selection": 2}
_FLAT = 8.0
"""Standard deviation in grey levels below which a square counts as flat."""
_CONTRAST = 50.0
"""Standard deviation in grey levels of a close-up's channel with the highest contrast."""
_ATTEMPTS = 20
"""Largest number of attempts to draw a square that is not flat."""


@dataclass(frozen=True)
class Photograph:
    """One photograph of an installed package.

    `held_out` is the edge (left, right, bottom) of the strip that is held out from training, chosen
    so that both parts show the subject.
    """

    name: str
    package: str
    path: str
    held_out: str


def photographs() -> list[Photograph]:
    """Return the photographs in order of their names."""
    skimage, sklearn = ("skimage", "data"), ("sklearn", "datasets/images")
    table = [
        ("astronaut", skimage, "astronaut.png", "bottom"),
        ("brick", skimage, "brick.png", "right"),
        ("chelsea", skimage, "chelsea.png", "right"),
        ("china", sklearn, "china.jpg", "left"),
        ("coffee", skimage, "coffee.png", "right"),
        ("flower", sklearn, "flower.jpg", "left"),
        ("hubble", skimage, "hubble_deep_field.jpg", "right"),
        ("motorcycle", skimage, "motorcycle_left.png", "right"),
        ("retina", skimage, "retina.jpg", "bottom"),
        ("rocket", skimage, "rocket.jpg", "right"),
    ]
    return [
        Photograph(name, package, f"{folder}/{file}", edge)
        for name, (package, folder), file, edge in table
    ]


def add_photographs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `photographs` to its parser."""
    parser.add_argument(
        "out", type=Path, help="the folder to write; train/, selection/ and validation/ in it"
    )
    parser.add_argument("--size", type=positive, default=64, help="side of a crop in pixels")
    parser.add_argument("--crops", type=positive, default=4000, help="training crops")
    parser.add_argument(
        "--selection-crops", type=positive, default=500, help="crops for selecting a probe's layer"
    )
    parser.add_argument("--validation-crops", type=positive, default=500, help="validation crops")
    parser.add_argument(
        "--sides",
        type=positive,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="close-ups: range of sides in pixels of the photograph or a reduced copy, enlarged to"
        " --size with normalized contrast; by default sides are at least a quarter of its height",
    )
    parser.add_argument(
        "--seed", type=non_negative, default=0, help="seed of positions, sizes and flips"
    )


def run_photographs(arguments: argparse.Namespace) -> int:
    """Write the crops, unless the folder has the same ones already. Raises UserError."""
    record = _record(arguments)
    out: Path = arguments.out
    totals = (arguments.crops, arguments.selection_crops, arguments.validation_crops)
    counts = dict(zip(_SPLITS, totals, strict=True))
    write = functools.partial(_write_crops, counts=counts, arguments=arguments)
    if not make_folder(out, RECORD_NAME, record, write):
        say(f"{out}: the crops exist already")
        return 0
    classes = len(photographs())
    say(
        f"{out}: {', '.join(f'{count} {split}' for split, count in counts.items())} crops"
        f" of {arguments.size}x{arguments.size} from {classes} photographs"
    )
    return 0


def _record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return everything that affects the crops. Raises UserError if `--sides` is invalid."""
    keys = ("size", "crops", "selection_crops", "validation_crops", "seed")
    record = {key: getattr(arguments, key) for key in keys}
    if sides := arguments.sides:
        if sides[0] > sides[1]:
            raise UserError(f"--sides {sides[0]} {sides[1]}: give the smaller one first")
        record["sides"] = sides
    record["photographs"] = [photograph.name for photograph in photographs()]
    return record


def _write_crops(folder: Path, *, counts: Mapping[str, int], arguments: argparse.Namespace) -> None:
    """Write the crops of every photograph to `folder`, `counts` of each split."""
    with ProgressBar("cutting photographs", total=sum(counts.values()), unit="crops") as progress:
        for number, photograph in enumerate(photographs()):
            image = load_photograph(photograph)
            for split, total in counts.items():
                options = {
                    "count": share(total, number=number, parts=len(photographs())),
                    "size": arguments.size,
                    "seed": [arguments.seed, number, _STREAMS[split]],
                }
                if arguments.sides is None:
                    crops = cut_crops(image, photograph, split=split, **options)
                else:
                    inside = cut_region(image, edge=photograph.held_out, split=split)
                    sides = tuple(arguments.sides)
                    crops = cut_close_ups(inside, sides=sides, turned=split == "train", **options)
                _save(crops, folder / split / photograph.name)
                progress.advance(options["count"])


def load_photograph(photograph: Photograph) -> Image.Image:
    """Open a photograph as RGB. Raises UserError if its package does not have it."""
    spec = find_spec(photograph.package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / photograph.path
        if path.is_file():
            return Image.open(path).convert("RGB")
    raise UserError(
        f"the photograph {photograph.path} of {photograph.package} is not installed: "
        "run `pip install 'megavis[demo]'`"
    )


def share(total: int, *, number: int, parts: int) -> int:
    """Return the number of crops, of `total`, for part `number`; shares differ by at most one."""
    return total // parts + (number < total % parts)


def region(image: Image.Image, *, edge: str, split: str) -> Window:
    """Return the region of a split.

    A strip of 35 % at `edge` is held out: 40 % of its length for selection and the rest for
    validation. The rest of the photograph is for training. Each region loses a margin.
    """
    along, across = image.size if edge == "bottom" else image.size[::-1]
    depth = round(across * _STRIP_SHARE)
    kept = across - depth - _MARGIN
    cut = round(along * _SELECTION_SHARE)
    # Rectangles in coordinates along the edge and away from it: start, depth, length, depth.
    start, length, near, deep = {
        "train": (0, along, depth + _MARGIN, kept),
        "selection": (0, cut, 0, depth),
        "validation": (cut + _MARGIN, along - cut - _MARGIN, 0, depth),
    }[split]
    if edge == "left":
        return Window(start, near, length, deep)
    if edge == "right":
        return Window(start, across - near - deep, length, deep)
    return Window(across - near - deep, start, deep, length)


def cut_region(image: Image.Image, *, edge: str, split: str) -> Image.Image:
    """Return the pixels of the region of a split."""
    inside = region(image, edge=edge, split=split)
    right, bottom = inside.left + inside.width, inside.top + inside.height
    return image.crop((inside.left, inside.top, right, bottom))


def cut_crops(
    image: Image.Image,
    photograph: Photograph,
    *,
    split: str,
    count: int,
    size: int,
    seed: list[int],
) -> Iterator[Image.Image]:
    """Yield random square crops of one split, resized to `size`.

    The side is log-uniform from a quarter of the photograph's height to the region's shorter
    side; half of the training crops are flipped.
    """
    random = np.random.default_rng(seed)
    inside = region(image, edge=photograph.held_out, split=split)
    largest = min(inside.width, inside.height)
    smallest = min(image.height // 4, largest)
    for _ in range(count):
        side = round(math.exp(random.uniform(math.log(smallest), math.log(largest))))
        left = inside.left + int(random.integers(0, inside.width - side + 1))
        top = inside.top + int(random.integers(0, inside.height - side + 1))
        crop = image.crop((left, top, left + side, top + side))
        crop = crop.resize((size, size), Image.Resampling.BICUBIC)
        if split == "train" and random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        yield crop


def _save(crops: Iterator[Image.Image], folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, crop in enumerate(crops):
        crop.save(folder / f"{number:05d}.png", compress_level=1)


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
        region: region of the photograph; reduced for each square by a random power of √2 that
            leaves room.
        count: number of squares.
        size: side of the results in pixels.
        seed: seed of all draws.
        sides: range of the side in pixels of the reduced region, log-uniform.
        turned: flip and rotate squares by multiples of 90° at random, since details have no
            orientation.
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
    """Return the image and copies reduced by √2, 2, 2√2 …, down to a shorter side of 2 `side`."""
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
    # Resizing a cropped square would flatten its border, which reveals a patch's position: let the
    # filter see the surroundings of the square inside the region.
    box = (left, top, left + side, top + side)
    return scale.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _deviation(pixels: np.ndarray) -> float:
    return float(np.max(pixels.std((0, 1))))


def _of_one_contrast(pixels: np.ndarray) -> np.ndarray:
    """Normalize float32 `[h, w, 3]` in [0, 255] to a grey mean and a standard contrast."""
    scale = _CONTRAST / max(_deviation(pixels), 1.0)
    moved = (pixels - pixels.mean((0, 1))) * scale + 127.5
    return moved.round().clip(0, 255).astype(np.uint8)
