"""`palette shards`: encode images as shards of palette tokens.

Several sizes are written in one decode, each to its own folder.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import decode_image, decoder_versions
from data_tools.jobs import add_job_arguments, run_job
from data_tools.resize import RESIZE, Crop, add_crop_arguments, crop_from
from data_tools.shard_tasks import Encoded, encode_each
from data_tools.source_formats import add_source_arguments, open_source
from data_tools.sources import SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.manifest import PALETTE_NAME
from megavis.tokenizers.palette import Palette


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `palette shards` to its parser."""
    add_source_arguments(parser)
    parser.add_argument("--palette", type=Path, required=True, help="a .npy file of `palette fit`")
    parser.add_argument(
        "--size",
        type=int,
        required=True,
        nargs="+",
        help="side of the images: 32, 48, 64; several sizes get a folder each below --out",
    )
    add_crop_arguments(parser, ("center", "evaluation", "random", "area"))
    parser.add_argument(
        "--fast",
        action="store_true",
        help="decode JPEG at a smaller scale, at least twice the size: other tokens",
    )
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folders. Raises UserError and OSError."""
    sizes = tuple(dict.fromkeys(arguments.size))
    if min(sizes) < 1:
        raise UserError("--size must be at least 1")
    crop = crop_from(arguments)
    palette = Palette.load(arguments.palette)
    source = open_source(arguments)
    encoder = PaletteEncoder(
        sizes=sizes,
        crop=crop,
        fast=arguments.fast,
        palette_path=arguments.palette.resolve(),
        palette_sha256=palette.sha256,
        num_colors=len(palette),
    )
    return run_job(source, encoder, arguments, label="palette shards")


@dataclass(frozen=True)
class PaletteEncoder:
    """Decode and resize images to each size, and encode them with nine bits per token.

    Attributes:
        sizes: sides of the images.
        crop: square crops to keep.
        fast: decode JPEG at a reduced scale, at least twice the size after the first resize.
        palette_path, palette_sha256, num_colors: the palette, loaded once per process.
    """

    sizes: tuple[int, ...]
    crop: Crop
    fast: bool
    palette_path: Path
    palette_sha256: str
    num_colors: int
    suffix: str = PaletteCodec.suffix
    batch_size: int = 16

    @property
    def folders(self) -> tuple[str, ...]:
        """One folder per size, or `--out` itself for a single one."""
        return ("",) if len(self.sizes) == 1 else tuple(map(str, self.sizes))

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the tokens."""
        return {
            "palette": self.palette_sha256,
            "size": self._size(folder),
            "preparation": [self._resize, str(self.crop), decoder_versions()],
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
            "preparation": {
                "resize": self._resize,
                "crop": str(self.crop),
                "decoders": decoder_versions(),
            },
        }

    @property
    def _resize(self) -> str:
        return f"{RESIZE}, JPEG decoded at a smaller scale" if self.fast else RESIZE

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
