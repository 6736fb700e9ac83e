"""`jpeg`: pictures become folders of JPEG files that training decodes and crops.

With `--size` every picture is resized, cut square and encoded again; without, JPEG files are kept
byte for byte and only pictures of other formats are encoded.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import RefusedImageError, decode_image, decoder_versions
from data_tools.jobs import add_job_arguments, run_job
from data_tools.layouts import add_source_arguments, open_source
from data_tools.resize import CROP, RESIZE, resize_and_crop
from data_tools.sources import Picture
from data_tools.units import Encoded
from megavis.config.errors import UserError
from megavis.data.jpeg import DamagedImageError, JpegCodec, decode_rgb

_JPEG_START = b"\xff\xd8\xff"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jpeg` to its parser."""
    add_source_arguments(parser)
    parser.add_argument(
        "--size", type=int, help="side of the stored squares; absent: pictures stay as they are"
    )
    parser.add_argument("--quality", type=int, default=95, help="of what is encoded, 1 to 100")
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder and say what is in it. Raises UserError and OSError."""
    if arguments.size is not None and arguments.size < 1:
        raise UserError("--size must be at least 1")
    if not 1 <= arguments.quality <= 100:
        raise UserError("--quality must lie in 1 to 100")
    source = open_source(arguments)
    return run_job(source, JpegRecipe(arguments.size, arguments.quality), arguments, label="jpeg")


@dataclass(frozen=True)
class JpegRecipe:
    """Decode everything once, so that what training would refuse is refused here.

    Attributes:
        size: side of the squares; None keeps pictures as they are.
        quality: of what is encoded.
    """

    size: int | None
    quality: int
    suffix: str = JpegCodec.suffix
    batch_size: int = 16
    folders: tuple[str, ...] = ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return what decides about the bytes."""
        return {"jpeg": [self.size, self.quality], "preparation": self._preparation()}

    def prepare(self, directory: Path) -> None:
        """A folder holds nothing besides shards."""

    def encode(self, pictures: list[Picture]) -> list[Encoded]:
        """Return one JPEG file of each picture."""
        encoded: list[Encoded] = []
        for picture in pictures:
            try:
                encoded.append([[self._payload(picture.content)]])
            except RefusedImageError as refusal:
                encoded.append(refusal)
        return encoded

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a JPEG data set."""
        return {"kind": "jpeg", "image_size": self.size, "preparation": self._preparation()}

    def _preparation(self) -> dict[str, Any]:
        if self.size is None:
            return {"resize": "none", "crop": "none", "decoders": decoder_versions()}
        return {"resize": RESIZE, "crop": CROP, "decoders": decoder_versions()}

    def _payload(self, content: bytes) -> bytes:
        image = decode_image(content)
        if self.size is not None:
            return _encode(resize_and_crop(image, size=self.size), self.quality)
        if content.startswith(_JPEG_START) and _reads(content):
            return content
        return _encode(image, self.quality)


def _reads(content: bytes) -> bool:
    """Whether training decodes this file as it is."""
    try:
        decode_rgb(content)
    except DamagedImageError:
        return False
    return True


def _encode(image: np.ndarray, quality: int) -> bytes:
    file = io.BytesIO()
    # Full colour resolution: at the small sizes of demos half of it would be seen.
    Image.fromarray(image).save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()
