"""Shards of JPEG files, decoded and cropped on the fly.

simplejpeg decodes, strictly: it refuses damaged files that Pillow silently accepts. Pillow reads
what simplejpeg does not know, such as the PNG that ImageNet holds under a JPEG's name.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from megavis.data.codecs.base import Codec, PaletteLike, Payloads, Refusals
from megavis.data.codecs.crops import WrongSizeError
from megavis.data.codecs.transforms import Transform

DAMAGED = "damaged"
_FORMATS = ("JPEG", "PNG", "MPO")


class DamagedImageError(ValueError):
    """Bytes that give no image."""


class JpegCodec(Codec):
    """JPEG files, as cropped pixels: uint8 `[b, size, size, 3]`; or as the ids of their colours.

    Args:
        transform: says what is cut out of each image; None for writing alone.
        palette: gives each pixel its id; pixels stay as they are where None.
    """

    suffix = "jpg"

    def __init__(
        self, transform: Transform | None = None, *, palette: PaletteLike | None = None
    ) -> None:
        self._transform, self._palette = transform, palette

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return pixels uint8 `[b, size, size, 3]`, or ids uint16 `[b, size · size]`."""
        pixels, refused = self._decode_pixels(payloads, positions)
        if self._palette is None:
            return pixels, refused
        return self._palette.encode(pixels).reshape(len(pixels), -1), refused

    def _decode_pixels(
        self, payloads: Payloads, positions: np.ndarray
    ) -> tuple[np.ndarray, Refusals]:
        assert self._transform is not None
        size = self._transform.image_size
        pixels = np.empty((len(payloads), size, size, 3), np.uint8)
        refused = {}
        draws = self._transform.draws(positions)
        for row, payload in enumerate(payloads):
            try:
                pixels[row] = self._transform(decode_rgb(payload), draws[row])
            except DamagedImageError:
                refused[row] = DAMAGED
            except WrongSizeError as error:
                refused[row] = str(error)
        return pixels, refused


def decode_rgb(content: bytes | np.ndarray) -> np.ndarray:
    """Return the pixels of a JPEG or PNG file, uint8 `[h, w, 3]`.

    Raises:
        DamagedImageError: it is cut, damaged, or neither.
    """
    import simplejpeg

    try:
        simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return _decode_with_pillow(bytes(content))
    try:
        return simplejpeg.decode_jpeg(content, colorspace="RGB", strict=True)
    except ValueError as error:
        raise DamagedImageError(str(error)) from None


def _decode_with_pillow(content: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata; the pixels are what counts
        try:
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
            return np.array(image.convert("RGB"))
        except Exception as error:
            # Decoders raise almost anything on damaged bytes: SyntaxError, struct.error, ...
            raise DamagedImageError(str(error)) from None
