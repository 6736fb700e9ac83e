"""Write images and label maps as shards of pairs, in their original size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError, decode_image, decoder_versions
from data_tools.jpeg_shards import kept_jpeg
from data_tools.pair_shards import encode_png
from data_tools.resize import check_aspect
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.sources import SourceImage
from megavis.data.codecs.jpeg import PairsCodec, join, split
from megavis.data.codecs.label_maps import to_pixels

SIZES_DIFFER = "image and label map differ in size"

ReadMap = Callable[[bytes], np.ndarray]
"""Maps the source's content of a label map to integers int64 `[h, w]`."""


@dataclass(frozen=True)
class LabelMapEncoder(ShardEncoder):
    """Keep JPEG files, re-encode other images as JPEG, and encode maps as PNG.

    `target` is that of the manifest; `read_map` is picklable and raises RefusedImageError.
    """

    quality: int
    target: dict[str, Any]
    read_map: ReadMap
    suffix: str = PairsCodec.suffix

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"label_maps": [self.quality, self.target], "preparation": self._preparation()}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one payload per pair."""
        return encode_each(pictures, lambda pair: [[self._payload(*split(pair.content))]])

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
        check_aspect(image)  # training resizes it
        jpeg = kept_jpeg(image_file, image, self.quality)
        return join(jpeg, encode_png(to_pixels(numbers)))
