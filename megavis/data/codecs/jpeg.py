"""Shards of JPEG files, decoded and cropped on the fly.

simplejpeg decodes, strictly: it refuses damaged files that Pillow silently accepts. Pillow reads
what simplejpeg does not know, such as the PNG that ImageNet holds under a JPEG's name.

Shards of pairs: an image and a target image, pixel by pixel.

The `.pair` payload is the length of the image's JPEG file as a little-endian uint32, that file, and
the target's PNG file. A target may be a map of labels, in which another colour is another label, so
it is stored without loss; both are cut and mirrored alike. Label maps (`label_maps.py`) may be
resized, by taking the nearest pixel; after that the segments of a panoptic map are numbered anew.

Legend: b samples.
"""

from __future__ import annotations

import io
import struct
import warnings

import numpy as np
from PIL import Image

from megavis.data.codecs.codec import Codec, PaletteLike, Payloads, Refusals
from megavis.data.codecs.crops import WrongSizeError
from megavis.data.codecs.label_maps import TargetKind, renumbered
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


_LENGTH = struct.Struct("<I")


class PairsCodec(Codec):
    """An image and its target: uint8 `[b, 2, size, size, 3]`, the image first.

    Args:
        transform: how both are cut and moved, which resizes nothing but images with label maps;
            None for writing alone.
        target: what targets show; colours when None.
    """

    suffix = "pair"

    def __init__(
        self, transform: Transform | None = None, *, target: TargetKind | None = None
    ) -> None:
        self._transform, self._target = transform, target

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return pixels uint8 `[b, 2, size, size, 3]`."""
        move = self._transform
        assert move is not None
        pixels = np.empty((len(payloads), 2, move.image_size, move.image_size, 3), np.uint8)
        refused = {}
        for row, (payload, draws) in enumerate(zip(payloads, move.draws(positions), strict=True)):
            try:
                image, target = split(bytes(payload))
                pixels[row, 0] = move(decode_rgb(image), draws)
                pixels[row, 1] = self._moved_target(decode_png(target), draws)
            except DamagedImageError:
                refused[row] = DAMAGED
            except WrongSizeError as error:
                refused[row] = str(error)
        return pixels, refused

    def _moved_target(self, target: np.ndarray, draws: np.ndarray) -> np.ndarray:
        assert self._transform is not None
        moved = self._transform(target, draws, is_map=self._target is not None)
        return renumbered(moved) if self._target == "panoptic" else moved


def join(image: bytes, target: bytes) -> bytes:
    """Return two files as one payload."""
    return _LENGTH.pack(len(image)) + image + target


def split(payload: bytes) -> tuple[bytes, bytes]:
    """Undo `join`; of what is no payload one part is empty."""
    start = _LENGTH.size
    stop = start + _LENGTH.unpack(payload[:start].ljust(start, b"\0"))[0]
    return payload[start:stop], payload[stop:]


def decode_png(content: bytes) -> np.ndarray:
    """Return uint8 `[h, w, 3]`. Raises DamagedImageError."""
    try:
        # Loading skips the checksums of pixel data; verify() reads them all.
        Image.open(io.BytesIO(content), formats=("PNG",)).verify()
        return np.array(Image.open(io.BytesIO(content), formats=("PNG",)).convert("RGB"))
    except Exception as error:
        # Decoders raise almost anything on damaged bytes: SyntaxError, struct.error, ...
        raise DamagedImageError(str(error)) from None
