"""`palette fit`, `grey` and `shards`: make a palette, and encode images as shards of its tokens.

Fitting can also write the error by number of colours, as a CSV and a plot. Several sizes of shards
are written in one decode, each to its own folder.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError, decode_image
from data_tools.job_report import ProgressBar, line_figure, say
from data_tools.jobs import add_job_arguments, run_job
from data_tools.measuring import add_measure_argument, measuring_too
from data_tools.resize import (
    Crop,
    Library,
    add_crop_arguments,
    add_resize_argument,
    crop_from,
    preparation,
    resize_and_crop,
    resize_name,
    side,
    versions,
)
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.source_formats import add_source_arguments, open_source
from data_tools.sources import ImageSource, Refuse, SourceImage, SourcePart
from data_tools.user_text import whole_number
from megavis.config.arguments import comma_separated, non_negative, output_file, positive
from megavis.config.errors import UserError, counted
from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.files import write_atomically
from megavis.data.format.manifest import PALETTE_NAME, SUFFIXES
from megavis.tokenizers.palette import (
    MAX_COLORS,
    MAX_GREYS,
    Palette,
    fit_palette,
    grey_palette,
)

# Pixels of one image are correlated: more images are better than more pixels.
_MIN_PIXELS_AN_IMAGE = 64
_ALL = 1 << 62  # files per part, if a source can be split anywhere
Point = tuple[int, float]
"""Number of colours, and mean squared error summed over red, green, blue in 0..255."""


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette fit` to its parser."""
    add_source_arguments(parser)
    parser.add_argument("--out", type=output_file, required=True, help="the .npy file to write")
    parser.add_argument(
        "--num-colors",
        type=whole_number(1, MAX_COLORS),
        metavar="N",
        default=MAX_COLORS,
        help="colours of the palette",
    )
    parser.add_argument("--pixels", type=positive, default=500_000, help="pixels to fit on")
    parser.add_argument(
        "--size", type=side, metavar="N", default=32, help="side that images are resized to"
    )
    add_resize_argument(parser)
    parser.add_argument(
        "--seed", type=non_negative, default=0, help="seed of sampled pixels and fit"
    )
    parser.add_argument(
        "--curve",
        type=comma_separated(whole_number(1, MAX_COLORS), "a list of numbers"),
        metavar="K,K,...",
        help="also fit palettes of these sizes, and write their errors next to --out: CSV, PNG",
    )


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit and write a palette, and print its error. Raises UserError."""
    pixels = sample_pixels(
        open_source(arguments),
        num_pixels=arguments.pixels,
        size=arguments.size,
        seed=arguments.seed,
        library=arguments.resize,
    )
    palette, error = fit_palette(pixels, num_colors=arguments.num_colors, seed=arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    palette.save(arguments.out)
    say(
        f"{arguments.out}: {len(palette)} colours from {len(pixels)} pixels, mean squared error "
        f"{error:.1f} (summed over red, green, blue in 0..255), SHA-256 {palette.sha256}"
    )
    if arguments.curve:
        _write_curve(arguments, pixels, known=(len(palette), error))
    return 0


def add_grey_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette grey` to its parser."""
    parser.add_argument("--out", type=output_file, required=True, help="the .npy file to write")
    parser.add_argument(
        "--num-colors",
        type=whole_number(1, MAX_GREYS),
        metavar="N",
        default=MAX_GREYS,
        help="greys, evenly spaced from black to white; default: all 256, so that a token is the"
        " value of its pixel",
    )


def run_grey(arguments: argparse.Namespace) -> int:
    """Write a palette of greys. Raises UserError and OSError."""
    palette = grey_palette(arguments.num_colors)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    palette.save(arguments.out)
    say(f"{arguments.out}: {counted(len(palette), 'grey')}, SHA-256 {palette.sha256}")
    return 0


def _write_curve(arguments: argparse.Namespace, pixels: np.ndarray, *, known: Point) -> None:
    """Write `<palette>_curve.csv` and `.png` next to the palette; `known` is not fitted again."""
    points = []
    for count in sorted(set(arguments.curve)):
        error = known[1]
        if count != known[0]:
            _, error = fit_palette(pixels, num_colors=count, seed=arguments.seed)
        points.append((count, error))
        say(f"  {count} colours: mean squared error {error:.1f}")
    table: Path = arguments.out.with_name(f"{arguments.out.stem}_curve.csv")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["num_colors", "mean_squared_error"])
    rows.writerows((count, f"{error:.3f}") for count, error in points)
    write_atomically(table, text.getvalue().encode())
    picture = table.with_suffix(".png")
    label = "mean squared error (RGB, 0..255)"
    write_atomically(picture, line_figure(points, xlabel="colours", ylabel=label, doubling=True))
    say(f"{table}, {picture}")


def sample_pixels(
    source: ImageSource, *, num_pixels: int, size: int, seed: int, library: Library
) -> np.ndarray:
    """Return at most `num_pixels` random pixels uint8 `[n, 3]` of resized images.

    Images come in random order and give equally many pixels, at least 64 each, so that only part of
    a large source is read; of webdataset tars, in random order, only the beginnings are read. A
    source with fewer images than expected is read again, for more pixels of each. Invalid files are
    skipped, and counted in print. Raises UserError if no file is a valid image.
    """
    parts = source.parts(files_per_part=_ALL, seed=seed)
    num_files = sum(part.num_files for part in parts)
    # Tars may not say how many images they hold.
    each = max(-(-num_pixels // num_files) if num_files else 0, _MIN_PIXELS_AN_IMAGE)
    sampled = functools.partial(
        _sampled, parts, num_pixels=num_pixels, size=size, seed=seed, library=library
    )
    samples, refused = sampled(each=min(each, size * size))
    if samples and len(samples) * len(samples[0]) < num_pixels and len(samples[0]) < size * size:
        samples, refused = sampled(each=min(-(-num_pixels // len(samples)), size * size))
    _say_refused(refused)
    if not samples:
        raise UserError(f"{source.root} has no valid image")
    return np.concatenate(samples)[:num_pixels]


def _sampled(
    parts: list[SourcePart], *, each: int, num_pixels: int, size: int, seed: int, library: Library
) -> tuple[list[np.ndarray], dict[str, str]]:
    """Return `each` pixels of images in random order, and reasons of invalid files by name."""
    random, wanted = np.random.default_rng(seed), -(-num_pixels // each)
    num_files = sum(part.num_files for part in parts)
    samples: list[np.ndarray] = []
    refused: dict[str, str] = {}  # by name: the beginnings of tars are read twice
    with ProgressBar("reading images", total=min(wanted, num_files)) as progress:
        for picture in _pictures(parts, refused.__setitem__, count=wanted, random=random):
            try:
                pixels = decode_image(picture.content)
                image = resize_and_crop(pixels, size=size, library=library)
            except RefusedImageError as refusal:
                refused[picture.name] = str(refusal)
                continue
            chosen = random.choice(size * size, each, replace=False)
            samples.append(image.reshape(-1, 3)[chosen])
            progress.advance()
            if len(samples) == wanted:
                break
    return samples, refused


def _say_refused(refused: Mapping[str, str]) -> None:
    """Print the number of rejected files by reason, from the reason by name, as `run_job` does."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in refused.items():
        names[reason].append(name)
    for reason in sorted(names):
        say(f"  skipped, {reason}: {len(names[reason])} (the first: {names[reason][0]})")


def _pictures(
    parts: list[SourcePart], refuse: Refuse, *, count: int, random: np.random.Generator
) -> Iterator[SourceImage]:
    """Yield images of all parts: a share of `count` from the start of each, then the rest."""
    if len(parts) == 1:
        yield from parts[0].pictures(refuse)
        return
    order, share = random.permutation(len(parts)).tolist(), -(-count // len(parts))
    for start, stop in ((0, share), (share, None)):
        for number in order:
            yield from itertools.islice(parts[number].pictures(refuse), start, stop)


def add_shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette shards` to its parser."""
    add_source_arguments(parser)
    parser.add_argument("--palette", type=Path, required=True, help="a .npy file of `palette fit`")
    parser.add_argument(
        "--size",
        type=side,
        metavar="N",
        required=True,
        nargs="+",
        help="side of the images: 32, 48, 64; several sizes get a folder each below --out",
    )
    add_crop_arguments(parser, ("center", "evaluation", "random", "inception"))
    parser.add_argument(
        "--fast",
        action="store_true",
        help="decode JPEG at a smaller scale, at least twice the size: other tokens",
    )
    add_measure_argument(parser)
    add_job_arguments(parser, stores=True)


def run_shards(arguments: argparse.Namespace) -> int:
    """Write the shard folders. Raises UserError and OSError."""
    sizes = tuple(dict.fromkeys(arguments.size))
    crop = crop_from(arguments)
    palette = Palette.load(arguments.palette)
    source = open_source(arguments)
    encoder: ShardEncoder = PaletteEncoder(
        sizes=sizes,
        crop=crop,
        fast=arguments.fast,
        palette_path=arguments.palette.resolve(),
        palette_sha256=palette.sha256,
        num_colors=len(palette),
    )
    encoder = measuring_too(encoder, arguments)
    return run_job(source, encoder, arguments, label="palette shards")


@dataclass(frozen=True)
class PaletteEncoder(ShardEncoder):
    """Decode and resize images to each size, and encode them with nine bits per token.

    With `fast`, JPEG is decoded at a reduced scale, at least twice the size after the first resize.
    """

    sizes: tuple[int, ...]
    crop: Crop
    fast: bool
    palette_path: Path
    palette_sha256: str
    num_colors: int
    suffix: str = SUFFIXES["palette"]

    @property
    def folders(self) -> tuple[str, ...]:
        """One folder per size, or `--out` itself for a single one."""
        return ("",) if len(self.sizes) == 1 else tuple(map(str, self.sizes))

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the tokens."""
        return {
            "palette": self.palette_sha256,
            "size": self._size(folder),
            "preparation": [self._resize, str(self.crop), versions(self.crop.library)],
        }

    def prepare(self, directory: Path) -> None:
        """Write the palette to a shard folder. Raises UserError if it has another one."""
        path = directory / PALETTE_NAME
        if not path.exists():
            self._palette().save(path)
        if Palette.load(path).sha256 != self.palette_sha256:
            raise UserError(f"{directory} holds shards of another palette: choose another --out")

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the packed tokens of each image, one payload per size."""
        palette = self._palette()

        def samples(picture: SourceImage) -> list[list[bytes]]:
            image = decode_image(picture.content, min_side=self._min_side)
            squares = self.crop.squares(image, sizes=self.sizes, name=picture.name)
            return [[_pack(palette, square) for square in same] for same in squares]

        return encode_each(pictures, samples)

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a palette data set."""
        size = self._size(folder)
        return {
            "kind": "palette",
            "image_size": size,
            "num_tokens": size**2,
            "tokenizer": {
                "kind": "palette",
                "sha256": self.palette_sha256,
                "num_tokens": self.num_colors,
            },
            "preparation": preparation(self._resize, str(self.crop), library=self.crop.library),
        }

    @property
    def _resize(self) -> str:
        name = resize_name(self.crop.library)
        return f"{name}, JPEG decoded at a smaller scale" if self.fast else name

    @property
    def _min_side(self) -> int:
        return 2 * self.crop.side_before(max(self.sizes)) if self.fast else 0

    def _size(self, folder: str) -> int:
        return int(folder) if folder else self.sizes[0]

    def _palette(self) -> Palette:
        return _load_palette(self.palette_path, self.palette_sha256)


def _pack(palette: Palette, image: np.ndarray) -> bytes:
    tokens = palette.encode(image)
    return PaletteCodec(tokens.size).encode(tokens)


@functools.lru_cache(maxsize=1)
def _load_palette(path: Path, sha256: str) -> Palette:
    # Cached between units of a process, with its table of known colours.
    palette = Palette.load(path)
    if palette.sha256 != sha256:
        raise UserError(f"{path} changed while it was in use: run the same command again")
    return palette
