"""Strict decoding of image files to RGB pixels, with a reason for each rejected file.

simplejpeg decodes JPEG files; it rejects truncated and damaged files that Pillow silently accepts.
Pillow decodes everything else. EXIF orientation and colour profiles are ignored, as in the
pipelines of the papers.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from megavis.data.codecs.jpeg import (
    DamagedImageError,
    TooManyPixelsError,
    UnsupportedJpegError,
    decode_strictly,
)
from megavis.data.codecs.metadata import pixels_of_png

MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs
# Only formats for photographs: some others start external programs.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000")
_STRIP_ROWS = 256
JPEG_START = b"\xff\xd8\xff"
_PNG_START = b"\x89PNG\r\n\x1a\n"
BIT_DEPTH = 24
"""Place of this byte in a PNG file."""
# The inverse of what Pillow does for a value of EXIF's orientation.
_TURNED_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
TRUNCATED = "truncated"
_KNOWN_STARTS = (JPEG_START, _PNG_START, b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")


class RefusedImageError(Exception):
    """A rejected file; the message is the reason under which it is counted."""


def decoder_versions() -> dict[str, str]:
    """Return the versions of the packages that affect decoded pixels."""
    return {package: version(package) for package in ("pillow", "simplejpeg")}


def decode_image(content: bytes, *, min_side: int = 0) -> np.ndarray:
    """Decode a file to RGB, uint8 `[h, w, 3]`.

    Grey, palette and CMYK images become RGB; 16-bit grey is scaled to 8 bits (rounded), 16-bit
    colour keeps its high bytes; transparency is composited on white; animations give their first
    frame. With `min_side`, a JPEG may be decoded at a scale of n / 8 whose sides are at least this:
    faster, but not equal to decoding at full size and resizing.

    Raises:
        RefusedImageError: zero bytes, not an image, truncated, damaged, too large, or of a pixel
            format without a known range.
    """
    if not content:
        raise RefusedImageError("zero bytes")
    if content.startswith(JPEG_START):
        pixels = _decode_jpeg(content, min_side)
        if pixels is not None:
            return pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata, which does not matter here
        return _decode_with_pillow(content)


def _decode_jpeg(content: bytes, min_side: int) -> np.ndarray | None:
    """Return RGB pixels, or None if only Pillow may support the file (rare chroma samplings)."""
    try:
        return decode_strictly(content, min_side=min_side, max_pixels=MAX_PIXELS)
    except UnsupportedJpegError:
        return None
    except TooManyPixelsError:
        raise RefusedImageError("too large") from None
    except DamagedImageError as error:
        truncated = "premature end" in str(error).lower()
        raise RefusedImageError(TRUNCATED if truncated else "damaged") from None


def _decode_with_pillow(content: bytes) -> np.ndarray:
    content = pixels_of_png(content) or content
    Image.init()  # registers the formats once
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        if content.startswith(_PNG_START):
            # Loading does not check the CRCs of pixel data; verify() does.
            Image.open(io.BytesIO(content), formats=formats).verify()
        opened = Image.open(io.BytesIO(content), formats=formats)
        if opened.width * opened.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        image = _loaded(opened)
    except Image.DecompressionBombError:
        raise RefusedImageError("too large") from None
    except UnidentifiedImageError:
        known = content.startswith(_KNOWN_STARTS)
        raise RefusedImageError("damaged" if known else "not an image") from None
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:
        # Decoders raise almost any exception on damaged bytes: SyntaxError, struct.error, ...
        raise RefusedImageError(_kind_of_damage(content, error)) from None
    # Pillow scales a PGM's numbers to 16 bits; the range of others, such as a TIFF's, is unknown.
    if image.mode == "I" and opened.format != "PPM":
        raise RefusedImageError("unsupported pixel format")
    if content.startswith(_PNG_START):
        _scale_key(image, bits=content[BIT_DEPTH])
    try:
        return _to_rgb(image)
    except ValueError:  # Pillow cannot convert this mode to RGB
        raise RefusedImageError("unsupported pixel format") from None


def _loaded(image: Image.Image) -> Image.Image:
    """Load an image as it is stored: Pillow turns a TIFF by its orientation, and no other file."""
    if image.format != "TIFF":  # damage to the metadata of others does not matter
        image.load()
        return image
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    image.load()
    greys = _in_16_bits(image) if image.mode.startswith("I;16") else image
    if orientation in _TURNED_BACK and ExifTags.Base.Orientation not in image.getexif():
        return greys.transpose(_TURNED_BACK[orientation])
    return greys


def _in_16_bits(image: Image.Image) -> Image.Image:
    """Return greys of a TIFF from black to white, which Pillow does only for up to 8 bits."""
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    is_white_zero = image.tag_v2.get(ExifTags.Base.PhotometricInterpretation) == 0
    is_short = image.tag_v2.get(ExifTags.Base.BitsPerSample) == (12,)
    if not is_white_zero and not is_short:
        return image
    values = np.asarray(image)
    if is_short:
        values = values << 4 | values >> 8
    return Image.fromarray(~values if is_white_zero else values)


def _scale_key(image: Image.Image, *, bits: int) -> None:
    """Scale a PNG's transparent colour, as Pillow does with its pixels of `bits` a value."""
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**bits - 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _kind_of_damage(content: bytes, error: Exception) -> str:
    text = str(error).lower()
    cut_png = content.startswith(_PNG_START) and b"IEND" not in content[-16:]
    return TRUNCATED if cut_png or "truncated" in text or "eof" in text else "damaged"


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Convert a loaded Pillow image of any mode to uint8 `[h, w, 3]`."""
    if image.mode.startswith("I"):
        return _sixteen_bit_to_rgb(image)
    if image.mode == "F":
        raise RefusedImageError("unsupported pixel format")
    if image.has_transparency_data:
        layers = image if image.mode == "RGBA" else image.convert("RGBA")
        # Many programs leave the fourth byte of a bitmap's pixels at zero; like browsers, do not
        # take that for an invisible image.
        if image.format not in ("BMP", "DIB") or layers.getchannel("A").getextrema() != (0, 0):
            return _on_white(layers)
    return np.asarray(image.convert("RGB"))


def _on_white(layers: Image.Image) -> np.ndarray:
    """Composite an RGBA image on white, in strips: whole copies of a large one take gigabytes."""
    pixels = np.empty((layers.height, layers.width, 3), np.uint8)
    for rows in _strips(layers.height):
        strip = layers.crop((0, rows.start, layers.width, rows.stop))
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        pixels[rows] = np.asarray(Image.alpha_composite(white, strip).convert("RGB"))
    return pixels


def _sixteen_bit_to_rgb(image: Image.Image) -> np.ndarray:
    # Pillow's conversion of these modes clips at 255 and would give a white image.
    values, key = np.asarray(image), image.info.get("transparency")
    pixels = np.empty((*values.shape, 3), np.uint8)
    for rows in _strips(len(values)):
        pixels[rows] = ((values[rows].astype(np.uint32) + 128) // 257)[:, :, None]
        if key is not None:
            pixels[rows][values[rows] == key] = 255
    return pixels


def _strips(height: int) -> Iterator[slice]:
    for top in range(0, height, _STRIP_ROWS):
        yield slice(top, min(top + _STRIP_ROWS, height))
