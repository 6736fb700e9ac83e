"""`palette fit`: fit a palette of up to 512 colours to the images of a source.

It can also write the error by number of colours, as a CSV and a plot.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_tools.decode import RefusedImageError, decode_image
from data_tools.job_report import ProgressBar, say
from data_tools.line_figure import line_figure
from data_tools.resize import resize_and_crop
from data_tools.source_formats import add_source_arguments, open_source
from data_tools.sources import ImageSource, SourceImage, SourcePart
from megavis.config.arguments import output_file
from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.tokenizers.palette import MAX_COLORS, Palette, fit_palette

# Pixels of one image are correlated: more images are better than more pixels.
_MIN_PIXELS_AN_IMAGE = 64
_ALL = 1 << 62  # files per part, if a source can be split anywhere


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette fit` to its parser."""
    add_source_arguments(parser)
    parser.add_argument("--out", type=output_file, required=True, help="the .npy file to write")
    parser.add_argument("--num-colors", type=int, default=MAX_COLORS, help="of the palette")
    parser.add_argument("--pixels", type=int, default=500_000, help="pixels to fit on")
    parser.add_argument("--size", type=int, default=32, help="side that images are resized to")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled pixels and the fit")
    parser.add_argument(
        "--curve",
        type=color_counts,
        metavar="K,K,...",
        help="also fit palettes of these sizes, and write their errors next to --out: CSV, PNG",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fit and write a palette, and print its error. Raises UserError."""
    if arguments.pixels < 1 or arguments.size < 1 or arguments.seed < 0:
        raise UserError("--pixels and --size must be at least 1, and --seed at least 0")
    if not 1 <= arguments.num_colors <= MAX_COLORS:
        raise UserError(f"--num-colors must be in [1, {MAX_COLORS}], not {arguments.num_colors}")
    pixels = sample_pixels(
        open_source(arguments),
        num_pixels=arguments.pixels,
        size=arguments.size,
        seed=arguments.seed,
    )
    palette, error = fit_palette(pixels, num_colors=arguments.num_colors, seed=arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    palette.save(arguments.out)
    say(_summary(palette, error, len(pixels), arguments.out))
    if arguments.curve:
        _write_curve(arguments, pixels, known=(len(palette), error))
    return 0


def _write_curve(arguments: argparse.Namespace, pixels: np.ndarray, *, known: Point) -> None:
    points = measure(pixels, arguments.curve, seed=arguments.seed, known=known)
    for count, error in points:
        say(f"  {count} colours: mean squared error {error:.1f}")
    table, picture = write(points, arguments.out)
    say(f"{table}, {picture}")


def sample_pixels(source: ImageSource, *, num_pixels: int, size: int, seed: int) -> np.ndarray:
    """Return at most `num_pixels` random pixels uint8 `[n, 3]` of resized images.

    Images come in random order and give equally many pixels, at least 64 each, so that only part of
    a large source is read: of webdataset tars, in random order, only the beginnings. Invalid files
    are skipped.

    Raises:
        UserError: no file is a valid image.
    """
    random = np.random.default_rng(seed)
    parts = source.parts(files_per_part=_ALL, seed=seed)
    num_files = sum(part.num_files for part in parts)
    each = max(-(-num_pixels // num_files) if num_files else 0, _MIN_PIXELS_AN_IMAGE)
    each = min(each, size * size)
    wanted = -(-num_pixels // each)
    samples: list[np.ndarray] = []
    with ProgressBar("reading images", total=min(wanted, num_files)) as progress:
        for picture in _pictures(parts, count=wanted, random=random):
            try:
                image = resize_and_crop(decode_image(picture.content), size=size)
            except RefusedImageError:
                continue
            chosen = random.choice(size * size, each, replace=False)
            samples.append(image.reshape(-1, 3)[chosen])
            progress.advance()
            if len(samples) == wanted:
                break
    if not samples:
        raise UserError(f"{source.root} has no valid image")
    return np.concatenate(samples)[:num_pixels]


def _pictures(
    parts: list[SourcePart], *, count: int, random: np.random.Generator
) -> Iterator[SourceImage]:
    """Yield images of all parts: a share of `count` from the start of each, then the rest."""
    if len(parts) == 1:
        yield from parts[0].pictures(_ignore)
        return
    order, share = random.permutation(len(parts)).tolist(), -(-count // len(parts))
    for start, stop in ((0, share), (share, None)):
        for number in order:
            yield from itertools.islice(parts[number].pictures(_ignore), start, stop)


def _ignore(name: str, reason: str) -> None:
    pass


def _summary(palette: Palette, error: float, num_pixels: int, out: Path) -> str:
    return (
        f"{out}: {len(palette)} colours from {num_pixels} pixels, mean squared error "
        f"{error:.1f} (summed over red, green, blue in 0..255), SHA-256 {palette.sha256}"
    )


Point = tuple[int, float]
"""Number of colours, and mean squared error summed over red, green, blue in 0..255."""


def color_counts(text: str) -> tuple[int, ...]:
    """Parse `64,128,256`. Raises argparse.ArgumentTypeError."""
    try:
        counts = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or not 1 <= counts[0] <= counts[-1] <= MAX_COLORS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers in 1..{MAX_COLORS}, such as 64,128,256,512"
        )
    return counts


def measure(pixels: np.ndarray, counts: Sequence[int], *, seed: int, known: Point) -> list[Point]:
    """Fit a palette of each size to pixels uint8 `[n, 3]`, except for `known`."""
    points = []
    for count in counts:
        error = known[1]
        if count != known[0]:
            _, error = fit_palette(pixels, num_colors=count, seed=seed)
        points.append((count, error))
    return points


def write(points: Sequence[Point], palette_path: Path) -> tuple[Path, Path]:
    """Write `<palette>_curve.csv` and `.png` next to the palette; return both paths."""
    table = palette_path.with_name(f"{palette_path.stem}_curve.csv")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["num_colors", "mean_squared_error"])
    rows.writerows((count, f"{error:.3f}") for count, error in points)
    write_atomically(table, text.getvalue().encode())
    picture = table.with_suffix(".png")
    error = "mean squared error (RGB, 0..255)"
    write_atomically(picture, line_figure(points, xlabel="colours", ylabel=error, doubling=True))
    return table, picture
