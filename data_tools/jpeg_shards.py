"""`jpeg`: shards of JPEG files that training decodes and crops.

With `--size`, every image is resized, cropped to a square and re-encoded, for any number of sizes
in one decode. Without, JPEG files are kept byte for byte and only other formats are encoded.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import decode_image
from data_tools.jobs import add_job_arguments, run_job
from data_tools.resize import CROP, RESIZE, check_aspect, preparation, resize_and_crop
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.source_formats import add_source_arguments, open_source
from data_tools.sources import SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import DamagedImageError, JpegCodec, decode_rgb

_JPEG_START = b"\xff\xd8\xff"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jpeg` to its parser."""
    add_source_arguments(parser)
    parser.add_argument(
        "--size",
        type=int,
        nargs="+",
        default=(),
        help="side of the stored squares; several sizes get a folder each below --out; by default "
        "images are stored unchanged",
    )
    add_quality_argument(parser)
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folders. Raises UserError and OSError."""
    sizes = tuple(dict.fromkeys(arguments.size))
    if min(sizes, default=1) < 1:
        raise UserError("--size must be at least 1")
    check_quality(arguments.quality)
    source = open_source(arguments)
    return run_job(source, JpegEncoder(sizes, arguments.quality), arguments, label="jpeg")


def add_quality_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that `check_quality` takes."""
    parser.add_argument(
        "--quality", type=int, default=95, help="JPEG quality of encoded images, 1 to 100"
    )


def check_quality(quality: int) -> None:
    """Raise UserError if a JPEG quality is out of range."""
    if not 1 <= quality <= 100:
        raise UserError("--quality must lie in 1 to 100")


@dataclass(frozen=True)
class JpegEncoder(ShardEncoder):
    """Write JPEG files; every image is decoded to reject those that training cannot read.

    Without `sizes`, the sides of the squares, images are kept unchanged.
    """

    sizes: tuple[int, ...]
    quality: int
    suffix: str = JpegCodec.suffix

    @property
    def folders(self) -> tuple[str, ...]:
        """One folder per size, or `--out` itself for a single one."""
        return tuple(map(str, self.sizes)) if len(self.sizes) > 1 else ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"jpeg": [self._size(folder), self.quality], "preparation": self._preparation()}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one JPEG file per image and folder."""
        return encode_each(
            pictures, lambda image: [[payload] for payload in self._payloads(image.content)]
        )

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a JPEG data set."""
        return {
            "kind": "jpeg",
            "image_size": self._size(folder),
            "preparation": self._preparation(),
        }

    def _size(self, folder: str) -> int | None:
        return int(folder) if folder else next(iter(self.sizes), None)

    def _preparation(self) -> dict[str, Any]:
        return preparation(RESIZE, CROP) if self.sizes else preparation()

    def _payloads(self, content: bytes) -> list[bytes]:
        image = decode_image(content)
        if self.sizes:
            return [encode_jpeg(resize_and_crop(image, size=s), self.quality) for s in self.sizes]
        check_aspect(image)  # training resizes it
        return [kept_jpeg(content, image, self.quality)]


def kept_jpeg(content: bytes, image: np.ndarray, quality: int) -> bytes:
    """Return a JPEG file unchanged, and re-encode others from their pixels uint8 `[h, w, 3]`."""
    if content.startswith(_JPEG_START) and _reads(content):
        return content
    return encode_jpeg(image, quality)


def _reads(content: bytes) -> bool:
    """Return whether training can decode this file unchanged."""
    try:
        decode_rgb(content)
    except DamagedImageError:
        return False
    return True


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encode uint8 `[h, w, 3]` as a JPEG file."""
    file = io.BytesIO()
    # Full colour resolution: chroma subsampling would be visible at the small sizes of demos.
    Image.fromarray(image).save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()
