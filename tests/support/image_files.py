"""Image files of many formats, valid and damaged, made with Pillow from real JPEGs."""

from __future__ import annotations

import io
import json
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image


def real_jpegs():
    """Return the paths of the JPEGs that foolbox ships."""
    # Locate foolbox without importing it.
    spec = find_spec("foolbox")
    assert spec is not None
    assert spec.origin is not None
    return sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg"))


def real_picture():
    """Return a photograph as a 96x64 Pillow image."""
    return Image.open(real_jpegs()[0]).convert("RGB").resize((96, 64))


def encoded(image, kind="JPEG", **options):
    """Return the bytes of an image file of a Pillow image or of pixels uint8 `[h, w, 3]`."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width, height, bits, kind, rows, key=b""):
    """Return a PNG of rows of bytes, with a transparent colour if `key` is given."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
        + (chunk(b"tRNS", key) if key else b"")
        + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
        + chunk(b"IEND", b"")
    )


def sixteen_bit_rgb_png(values):
    """Return a PNG of uint16 `[h, w, 3]`, which Pillow cannot write."""
    height, width = values.shape[:2]
    return png(width, height, 16, 2, [row.astype(">u2").tobytes() for row in values])


def bad_files():
    """Name -> (bytes, reported reason; None if it depends on the version of Pillow)."""
    picture = real_picture()
    jpeg, png = encoded(picture, "JPEG", quality=90), encoded(picture, "PNG")
    gif = encoded(picture, "GIF")
    tiff = encoded(picture, "TIFF")
    webp = encoded(picture, "WEBP")
    flipped_png = bytearray(png)
    flipped_png[len(png) // 2] ^= 0xFF
    floats = encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF")
    return {
        "zero.jpg": (b"", "zero bytes"),
        "text.jpg": (b"text in spite of its name", "not an image"),
        "zeros.png": (bytes(1000), "not an image"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "last.jpg": (jpeg[:-40], "truncated"),
        "start.jpg": (jpeg[:100], None),
        "hole.jpg": (jpeg[:900] + b"\xff\x00\x12" + jpeg[1000:], "damaged"),
        "half.png": (png[: len(png) // 2], "truncated"),
        "no_end.png": (png[:-12], "truncated"),
        "flipped.png": (bytes(flipped_png), "damaged"),
        "half.gif": (gif[: len(gif) // 2], "truncated"),
        "half.tif": (tiff[: len(tiff) // 2], None),
        "half.webp": (webp[: len(webp) // 2], None),
        "start.png": (png[:20], None),
        "float.tif": (floats, "unsupported pixel format"),
        "thin.png": (encoded(Image.new("RGB", (650, 10)), "PNG"), "aspect ratio above 64"),
    }


def tree(folder):
    """Name -> bytes of the files of a folder, without the measurements in its report."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    if "report.json" in files:
        report = json.loads(files["report.json"])
        del report["measured"]
        files["report.json"] = json.dumps(report).encode()
    return files
