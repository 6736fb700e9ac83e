"""Codecs for JPEG files and for pairs of an image and a target image.

simplejpeg decodes strictly: it rejects damaged files that Pillow silently accepts. Pillow decodes
what simplejpeg does not support, such as the PNG in ImageNet that has a JPEG's name.

A `.pair` payload is the length of the image's JPEG file as a little-endian uint32, that file, and
the target's PNG file. Colours of a target may be labels, so targets are stored losslessly; image
and target get the same crop and flip. Only label maps (`label_maps.py`) may be resized, to the
nearest pixel; afterwards the segments of a panoptic map are renumbered.

Legend: b samples.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from megavis.data.codecs.codec import Codec, PaletteLike, Payloads, Refusals
from megavis.data.codecs.crops import WrongSizeError
from megavis.data.codecs.label_maps import TargetKind, renumbered
from megavis.data.codecs.metadata import pixels_of_jpeg, pixels_of_png
from megavis.data.codecs.transforms import Transform

DAMAGED = "damaged"
_FORMATS = ("JPEG", "PNG")
_LENGTH = struct.Struct("<I")
_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
"""The filter of its warnings, as `warnings.filters` holds it."""


class DamagedImageError(ValueError):
    """The bytes cannot be decoded as an image."""


class UnsupportedJpegError(DamagedImageError):
    """simplejpeg does not read this kind of file."""


class TooManyPixelsError(ValueError):
    """An image is larger than allowed."""


class JpegCodec(Codec):
    """JPEG files, decoded to cropped pixels or, with a palette, to the ids of their colours.

    Args:
        transform: crop and augmentation.
        palette: maps each pixel to an id, if given.
    """

    def __init__(self, transform: Transform, *, palette: PaletteLike | None = None) -> None:
        self._transform, self._palette = transform, palette

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to pixels uint8 `[b, size, size, 3]`, or to ids uint16 `[b, size · size]`."""
        transform = self._transform
        draws, size = transform.draws(positions), transform.image_size
        pixels = np.empty((len(payloads), size, size, 3), np.uint8)

        def fill(row: int, payload: np.ndarray) -> None:
            pixels[row] = transform(decode_rgb(payload), draws[row])

        refused = refusals(payloads, fill)
        if self._palette is None:
            return pixels, refused
        return self._palette.encode(pixels).reshape(len(pixels), size**2), refused


def decode_rgb(content: bytes | np.ndarray) -> np.ndarray:
    """Decode a JPEG or PNG file to uint8 `[h, w, 3]`. Raises DamagedImageError."""
    try:
        return decode_strictly(content)
    except UnsupportedJpegError:
        return _decode_with_pillow(bytes(content))


def decode_strictly(
    content: bytes | np.ndarray, *, min_side: int = 0, max_pixels: int | None = None
) -> np.ndarray:
    """Decode a JPEG file with intact pixels, whatever its metadata.

    Args:
        content: the file.
        min_side: if positive, it may be decoded at a scale of n / 8 with sides of at least this.
        max_pixels: limit of height times width.

    Returns:
        uint8 `[h, w, 3]`.

    Raises:
        UnsupportedJpegError: only Pillow may support the file, or it is not a JPEG.
        TooManyPixelsError: the image is larger than `max_pixels`.
        DamagedImageError: the pixels are cut or damaged.
    """
    try:
        return _decode_strictly(content, min_side, max_pixels)
    except DamagedImageError as error:
        first = error
    reduced = pixels_of_jpeg(bytes(content))
    if reduced is None:
        raise first
    try:
        return _decode_strictly(reduced, min_side, max_pixels)
    except UnsupportedJpegError:
        raise first from None


def _decode_strictly(
    content: bytes | np.ndarray, min_side: int, max_pixels: int | None
) -> np.ndarray:
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError as error:
        raise UnsupportedJpegError(str(error)) from None
    # Check the header before decoding: a small file may claim gigabytes of pixels.
    if max_pixels is not None and height * width > max_pixels:
        raise TooManyPixelsError(f"{height} x {width} pixels")
    try:
        return simplejpeg.decode_jpeg(
            content, colorspace="RGB", min_height=min_side, min_width=min_side, strict=True
        )
    except ValueError as error:
        raise DamagedImageError(str(error)) from None


def _decode_with_pillow(content: bytes) -> np.ndarray:
    _ignore_warnings_of_pillow()
    try:
        image = Image.open(io.BytesIO(pixels_of_png(content) or content), formats=_FORMATS)
        return np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise DamagedImageError("neither a JPEG nor a PNG file") from None
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:
        # Decoders raise almost any exception on damaged bytes: SyntaxError, struct.error, ...
        raise DamagedImageError(str(error)) from None


def _ignore_warnings_of_pillow() -> None:
    """Permanently ignore Pillow's warnings, which concern odd metadata that does not matter here.

    `warnings.catch_warnings` replaces the filters of the whole process, and this runs in threads:
    if two are inside at once, the last to leave would restore the other's filters.
    """
    if warnings.filters[:1] != [_PILLOW]:
        warnings.filterwarnings("ignore", module=_PILLOW[3].pattern)


class PairsCodec(Codec):
    """An image and its target: uint8 `[b, 2, size, size, 3]`, the image first.

    Args:
        transform: crop and flip of both, which resizes only images with label maps.
        target: kind of label map in the targets; None for colours.
    """

    def __init__(self, transform: Transform, *, target: TargetKind | None = None) -> None:
        self._transform, self._target = transform, target

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to pixels uint8 `[b, 2, size, size, 3]`."""
        transform, kind = self._transform, self._target
        draws, size = transform.draws(positions), transform.image_size
        pixels = np.empty((len(payloads), 2, size, size, 3), np.uint8)

        def fill(row: int, payload: np.ndarray) -> None:
            image, target = split(bytes(payload))
            pixels[row, 0] = transform(decode_rgb(image), draws[row])
            moved = transform(decode_png(target), draws[row], is_map=kind is not None)
            pixels[row, 1] = renumbered(moved) if kind == "panoptic" else moved

        return pixels, refusals(payloads, fill)


def refusals(payloads: Payloads, fill: Callable[[int, np.ndarray], None]) -> Refusals:
    """Fill the row of each payload; return those that cannot be decoded or cropped."""
    refused = {}
    for row, payload in enumerate(payloads):
        try:
            fill(row, payload)
        except DamagedImageError:
            refused[row] = DAMAGED
        except WrongSizeError as error:
            refused[row] = str(error)
    return refused


def join(image: bytes, target: bytes) -> bytes:
    """Pack an image file and a target file into one payload."""
    return _LENGTH.pack(len(image)) + image + target


def split(payload: bytes) -> tuple[bytes, bytes]:
    """Undo `join`; for an invalid payload one of the parts is empty."""
    start = _LENGTH.size
    stop = start + _LENGTH.unpack(payload[:start].ljust(start, b"\0"))[0]
    return payload[start:stop], payload[stop:]


def decode_png(content: bytes) -> np.ndarray:
    """Decode to uint8 `[h, w, 3]`. Raises DamagedImageError."""
    content = pixels_of_png(content) or content
    try:
        # Loading does not check the CRCs of pixel data; verify() does.
        Image.open(io.BytesIO(content), formats=("PNG",)).verify()
        return np.array(Image.open(io.BytesIO(content), formats=("PNG",)).convert("RGB"))
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:
        # Decoders raise almost any exception on damaged bytes: SyntaxError, struct.error, ...
        raise DamagedImageError(str(error)) from None
