"""Images and label maps as pairs of shards, in the size of their originals."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import RefusedImageError, decode_image, decoder_versions
from data_tools.jpeg_shards import kept_jpeg
from data_tools.shard_tasks import Encoded
from data_tools.sources import SourceImage
from megavis.data.codecs.jpeg import PairsCodec, join, split
from megavis.data.codecs.label_maps import to_pixels

SIZES_DIFFER = "image and label map differ in size"

ReadMap = Callable[[bytes], np.ndarray]
"""From what a source gives for a map to the numbers of its pixels, int64 `[h, w]`."""


@dataclass(frozen=True)
class LabelMapEncoder:
    """JPEG files as they are, other images encoded anew, and maps as PNG.

    Attributes:
        quality: of the JPEG files that are encoded.
        target: the manifest's `target`.
        read_map: a function of a module; raises RefusedImageError.
    """

    quality: int
    target: dict[str, Any]
    read_map: ReadMap
    suffix: str = PairsCodec.suffix
    batch_size: int = 16
    folders: tuple[str, ...] = ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return what decides about the bytes."""
        return {"label_maps": [self.quality, self.target], "preparation": self._preparation()}

    def prepare(self, directory: Any) -> None:
        """A folder holds nothing besides shards."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one payload of each pair."""
        encoded: list[Encoded] = []
        for picture in pictures:
            try:
                encoded.append([[self._payload(*split(picture.content))]])
            except RefusedImageError as refusal:
                encoded.append(refusal)
        return encoded

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of images and maps."""
        return {
            "kind": "pairs",
            "image_size": None,
            "target": self.target,
            "preparation": self._preparation(),
        }

    def _preparation(self) -> dict[str, Any]:
        return {"resize": "none", "crop": "none", "decoders": decoder_versions()}

    def _payload(self, image_file: bytes, map_content: bytes) -> bytes:
        image = decode_image(image_file)
        numbers = self.read_map(map_content)
        if image.shape[:2] != numbers.shape:
            raise RefusedImageError(SIZES_DIFFER)
        png = io.BytesIO()
        Image.fromarray(to_pixels(numbers)).save(png, "PNG")
        return join(kept_jpeg(image_file, image, self.quality), png.getvalue())
