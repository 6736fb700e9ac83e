"""`letters`: capital letters in matplotlib's fonts, with separate fonts for validation.

Class = letter. Colours, and whether ink or ground is lighter, are random, so only the shape
identifies a letter. Every image is a function of the seed, its part and its number, computed in
integers and stored without compression: the bytes are the same on every processor with the same
versions of Pillow (with its FreeType) and matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features
from PIL import __version__ as pillow_version

from data_tools.engines import process_map
from data_tools.fonts import FONTS, describe_fonts, glyph
from data_tools.inspection import tile
from data_tools.job_report import ProgressBar, say
from data_tools.jobs import add_workers_argument
from data_tools.made_folder import make_folder
from data_tools.photographs import cut_crops, load_photograph, photographs
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError

RECORD_NAME = "letters.json"
SHEET_NAME = "sheet.png"
FONTS_NAME = "FONTS.txt"
LEAST_CONTRAST = 60
"""Least difference between the luminances of ink and ground, of 255."""
COLORS = {
    "eight": (
        (0, 0, 0),
        (255, 255, 255),
        (230, 60, 50),
        (40, 160, 70),
        (50, 90, 220),
        (250, 210, 60),
        (150, 60, 170),
        (80, 200, 220),
    ),
    "black-white": ((0, 0, 0), (255, 255, 255)),
}
_STREAMS = {"train": 0, "selection": 1, "validation": 2}
_STRETCH = (950, 1050)  # in thousandths of the width
_SHEET_SIDE = 24
_CHUNK = 512
Color = tuple[int, int, int]


@dataclass(frozen=True)
class LetterRecipe:
    """Settings of the images, except for their number.

    Attributes:
        size: side of an image in pixels.
        letters: the classes.
        glyph: range of a letter's larger side, in per cent of `size`.
        colors: `eight`, `black-white` or `any`.
        clutter: background: `none` for one colour, or `photographs`.
        seed: seed of all draws.
    """

    size: int
    letters: str
    glyph: tuple[int, int]
    colors: str
    clutter: str
    seed: int

    @property
    def oversampling(self) -> int:
        """Oversampling factor per side."""
        return min(max(256 // self.size, 2), 8)


def letters_of(text: str) -> str:
    """Parse capital letters, or their number from A. Raises argparse.ArgumentTypeError."""
    if text.isdecimal() and 1 <= int(text) <= len(string.ascii_uppercase):
        return string.ascii_uppercase[: int(text)]
    if not text or set(text) - set(string.ascii_uppercase) or len(set(text)) < len(text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither a number from 1 to 26 nor different capital letters, like ABC"
        )
    return "".join(sorted(text))


def add_letters_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `letters` to its parser."""
    parser.add_argument(
        "out",
        type=Path,
        help="folder to write: train/, selection/ and validation/ with a folder per letter each;"
        f" {SHEET_NAME}, a contact sheet; {FONTS_NAME}, the fonts of each part and their licences",
    )
    parser.add_argument("--size", type=positive, default=12, help="side of an image in pixels")
    parser.add_argument("--images", type=positive, default=26_000, help="training images")
    parser.add_argument(
        "--selection-images", type=positive, default=520, help="images to select a probe's layer"
    )
    parser.add_argument(
        "--validation-images", type=positive, default=1040, help="validation images"
    )
    parser.add_argument(
        "--letters",
        type=letters_of,
        default="26",
        metavar="N|ABC",
        help="the classes: a number of letters from A, or the letters",
    )
    parser.add_argument(
        "--glyph",
        type=positive,
        nargs=2,
        default=(85, 92),
        metavar=("MIN", "MAX"),
        help="range of a letter's larger side in per cent of --size",
    )
    parser.add_argument(
        "--colors",
        choices=(*COLORS, "any"),
        default="eight",
        help=f"colours of ink and ground; luminances differ by at least {LEAST_CONTRAST} of 255",
    )
    parser.add_argument(
        "--clutter",
        choices=("none", "photographs"),
        default="none",
        help="the background: one colour, or crops of the photographs in scikit-image and"
        " scikit-learn, from separate regions for each part",
    )
    parser.add_argument("--seed", type=non_negative, default=0, help="seed of all draws")
    add_workers_argument(parser)


def run_letters(arguments: argparse.Namespace) -> int:
    """Draw the letters, unless the folder has the same ones already. Raises UserError."""
    recipe = _recipe(arguments)
    totals = (arguments.images, arguments.selection_images, arguments.validation_images)
    counts = dict(zip(FONTS, totals, strict=True))
    if few := [part for part, count in counts.items() if count < len(recipe.letters)]:
        raise UserError(
            f"{counts[few[0]]} {few[0]} images of {len(recipe.letters)} letters: give at least one"
            " per letter"
        )
    out: Path = arguments.out
    write = functools.partial(_write, counts=counts, recipe=recipe, workers=arguments.workers)
    if not make_folder(out, RECORD_NAME, _record(recipe, counts), write):
        say(f"{out}: the letters exist already")
        return 0
    parts = (f"{count} {part} ({len(FONTS[part])} fonts)" for part, count in counts.items())
    say(
        f"{out}: {', '.join(parts)} images of {recipe.size}x{recipe.size}, {len(recipe.letters)}"
        f" letters; {out / SHEET_NAME} shows one row per font"
    )
    return 0


def _recipe(arguments: argparse.Namespace) -> LetterRecipe:
    least, largest = arguments.glyph
    if not least <= largest <= 100:
        raise UserError(f"--glyph {least} {largest}: give the smaller one first, and at most 100")
    return LetterRecipe(
        size=arguments.size,
        letters=arguments.letters,
        glyph=(least, largest),
        colors=arguments.colors,
        clutter=arguments.clutter,
        seed=arguments.seed,
    )


def _record(recipe: LetterRecipe, counts: dict[str, int]) -> dict[str, Any]:
    import matplotlib

    return {
        **asdict(recipe),
        "images": counts,
        "fonts": {part: list(fonts) for part, fonts in FONTS.items()},
        "versions": {
            "pillow": pillow_version,
            "freetype": features.version("freetype2"),
            "matplotlib": matplotlib.__version__,
        },
    }


def _write(folder: Path, *, counts: dict[str, int], recipe: LetterRecipe, workers: int) -> None:
    for part, letter in itertools.product(counts, recipe.letters):
        (folder / part / letter).mkdir(parents=True)
    tasks = [
        (folder, part, range(start, min(start + _CHUNK, count)), recipe)
        for part, count in counts.items()
        for start in range(0, count, _CHUNK)
    ]
    total = sum(counts.values())
    with process_map(workers) as each, ProgressBar("drawing letters", total=total) as progress:
        for done in each(_write_images, tasks):
            progress.advance(done)
    _save(_sheet(folder, counts, recipe), folder / SHEET_NAME)
    (folder / FONTS_NAME).write_text(describe_fonts(recipe.letters), encoding="utf-8")


Task = tuple[Path, str, range, LetterRecipe]


def _write_images(task: Task) -> int:
    folder, part, numbers, recipe = task
    for number in numbers:
        _save(draw(recipe, part, number), folder / image_name(recipe, part, number))
    return len(numbers)


def image_name(recipe: LetterRecipe, part: str, number: int) -> str:
    """Return the path of an image below the folder, with its letter, number and font."""
    letter, font = letter_and_font(recipe, part, number)
    return f"{part}/{letter}/{number:06d}-{font}.png"


def letter_and_font(recipe: LetterRecipe, part: str, number: int) -> tuple[str, str]:
    """Return an image's letter and font: cycle through letters, and through fonts per letter."""
    round_, place = divmod(number, len(recipe.letters))
    return recipe.letters[place], FONTS[part][round_ % len(FONTS[part])]


def draw(recipe: LetterRecipe, part: str, number: int) -> np.ndarray:
    """Draw image `number` of a part: uint8 `[size, size, 3]`. Raises UserError."""
    random = np.random.default_rng([recipe.seed, _STREAMS[part], number])
    coverage = _coverage(recipe, *letter_and_font(recipe, part, number), random)[..., None]
    if recipe.clutter == "photographs":
        ground = _crop(recipe.size, part, random)
        ink = np.array(_color(recipe, random, unlike=luminance(ground.mean((0, 1)).astype(int))))
    else:
        color = _color(recipe, random)
        ground, ink = np.array(color), np.array(_color(recipe, random, unlike=luminance(color)))
    full = 255 * recipe.oversampling**2
    mixed = (coverage * ink + (full - coverage) * ground + full // 2) // full
    return mixed.astype(np.uint8)


def _coverage(
    recipe: LetterRecipe, letter: str, font: str, random: np.random.Generator
) -> np.ndarray:
    """Return the ink coverage, int64 `[size, size]`, at most 255 · oversampling²."""
    fine = recipe.oversampling
    side = recipe.size * fine
    # Draw the glyph larger than needed, so that it is only scaled down.
    mask = glyph(font, letter, side * 3 // 2)
    share = int(random.integers(10 * recipe.glyph[0], 10 * recipe.glyph[1] + 1))
    stretch = int(random.integers(_STRETCH[0], _STRETCH[1] + 1))
    tall, wide = 1000 * mask.shape[0], stretch * mask.shape[1]
    height, width = (
        max(side * share * length // (1000 * max(tall, wide)), 1) for length in (tall, wide)
    )
    top, left = (
        min(
            max((side - length) // 2 + int(random.integers(-fine // 2, fine // 2 + 1)), 0),
            side - length,
        )
        for length in (height, width)
    )
    paper = np.zeros((side, side), np.uint8)
    resized = mask[_nearest(height, mask.shape[0])][:, _nearest(width, mask.shape[1])]
    paper[top : top + height, left : left + width] = resized
    # Sum rows first, which is faster.
    rows = np.add.reduce(paper.reshape(recipe.size, fine, side), axis=1, dtype=np.int32)
    return rows.reshape(recipe.size, recipe.size, fine).sum(2)


def _nearest(target: int, source: int) -> np.ndarray:
    """Return the index of the nearest of `source` pixels for each of `target` pixels."""
    return (2 * np.arange(target) + 1) * source // (2 * target)


def luminance(color: Sequence[int] | np.ndarray) -> int:
    """Return the luminance of a colour, 0 to 255 (weights of ITU-R BT.601, rounded down)."""
    red, green, blue = map(int, color)
    return (299 * red + 587 * green + 114 * blue) // 1000


def _color(
    recipe: LetterRecipe, random: np.random.Generator, *, unlike: int | None = None
) -> Color:
    """Draw a colour whose luminance differs enough from `unlike`."""
    while True:
        if recipe.colors == "any":
            color = tuple(random.integers(0, 256, 3).tolist())
        else:
            choice = COLORS[recipe.colors]
            color = choice[int(random.integers(len(choice)))]
        if unlike is None or abs(luminance(color) - unlike) >= LEAST_CONTRAST:
            return color


@functools.cache
def _photographs() -> list[Image.Image]:
    return [load_photograph(photograph) for photograph in photographs()]


def _crop(size: int, part: str, random: np.random.Generator) -> np.ndarray:
    number = int(random.integers(len(photographs())))
    seed = [int(random.integers(2**32))]
    photograph, image = photographs()[number], _photographs()[number]
    (crop,) = cut_crops(image, photograph, split=part, count=1, size=size, seed=seed)
    return np.asarray(crop, np.int64)


def _sheet(folder: Path, counts: dict[str, int], recipe: LetterRecipe) -> np.ndarray:
    """Return a contact sheet of each part, with a column per letter and a row per font."""
    rounds = {
        part: min(count // len(recipe.letters), len(FONTS[part])) for part, count in counts.items()
    }
    names = [
        image_name(recipe, part, number)
        for part, rows in rounds.items()
        for number in range(rows * len(recipe.letters))
    ]
    images = np.stack([np.asarray(Image.open(folder / name)) for name in names])
    scale = max(_SHEET_SIDE // recipe.size, 1)
    return tile(images, scale=scale, columns=len(recipe.letters))


def _save(image: np.ndarray, path: Path) -> None:
    # Compressed bytes depend on the library version and the processor.
    Image.fromarray(image).save(path, compress_level=0)
