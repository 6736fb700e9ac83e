"""Images with odd headers or metadata but whole pixels are kept; cut and damaged ones are not."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from image_files import encoded, real_picture
from image_sources import write_folder

from data_tools.__main__ import main
from data_tools.decode import RefusedImageError, decode_image
from megavis.data.codecs.jpeg import DamagedImageError, decode_rgb
from megavis.data.codecs.metadata import pixels_of_jpeg, pixels_of_png
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once

PLAIN_JPEG = encoded(real_picture(), "JPEG", quality=90)
PLAIN_PNG = encoded(real_picture(), "PNG")


def scan_header(content):
    """Return where the three bytes Ss, Se, Ah and Al of the first scan start."""
    start = content.index(b"\xff\xda")
    return start + 5 + 2 * content[start + 4]


def with_byte(content, place, value):
    changed = bytearray(content)
    changed[place] = value
    return bytes(changed)


def behind_start(content, segment):
    return content[:2] + segment + content[2:]


def segment(marker, content):
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


JPEGS = {
    "Se = 0 (Samsung)": with_byte(PLAIN_JPEG, scan_header(PLAIN_JPEG) + 1, 0),
    "Ah and Al": with_byte(PLAIN_JPEG, scan_header(PLAIN_JPEG) + 2, 0x11),
    "JFIF of another version": with_byte(PLAIN_JPEG, PLAIN_JPEG.index(b"JFIF\0") + 5, 3),
    "a bad ICC profile": behind_start(PLAIN_JPEG, segment(0xE2, b"ICC_PROFILE\0\3\2abcd")),
    "bytes between segments": behind_start(PLAIN_JPEG, segment(0xFE, b"abc") + b"garbage"),
    "an unknown Adobe transform": behind_start(PLAIN_JPEG, segment(0xEE, b"Adobe\0\x64\0\0\0\0\7")),
    "zeros before the end": PLAIN_JPEG[:-2] + bytes(100) + PLAIN_JPEG[-2:],
    "text after the end": PLAIN_JPEG + b"trailing" * 100,
}


@pytest.mark.parametrize("name", JPEGS)
def test_jpegs_with_whole_pixels_are_kept(name):
    expected = decode_image(PLAIN_JPEG)
    np.testing.assert_array_equal(decode_image(JPEGS[name]), expected)
    np.testing.assert_array_equal(decode_rgb(JPEGS[name]), expected)
    assert (
        decode_image(JPEGS[name], min_side=16).shape == decode_image(PLAIN_JPEG, min_side=16).shape
    )


@pytest.mark.parametrize("name", JPEGS)
def test_cut_jpegs_are_refused(name):
    content = JPEGS[name]
    middle = (content.index(b"\xff\xda") + len(content)) // 2
    with pytest.raises(RefusedImageError, match="truncated"):
        decode_image(content[:middle])


@pytest.mark.parametrize("name", [name for name in JPEGS if name != "zeros before the end"])
def test_damaged_jpegs_are_refused(name):
    """Zeros before the end could stand for the data that a hole takes away."""
    content = JPEGS[name]
    middle = (content.index(b"\xff\xda") + len(content)) // 2
    hole = content[:middle] + b"\xff\x00\x12" + content[middle + 150 :]
    for decode, error in ((decode_image, RefusedImageError), (decode_rgb, DamagedImageError)):
        with pytest.raises(error):
            decode(hole)


def chunk(kind, content):
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def behind_header(*chunks):
    return PLAIN_PNG[:33] + b"".join(chunks) + PLAIN_PNG[33:]


LONG = bytes(3_000_000)
PNGS = {
    "3 MB of text": behind_header(chunk(b"tEXt", b"Comment\0" + b"x" * 3_000_000)),
    "3 MB of compressed text": behind_header(chunk(b"zTXt", b"Comment\0\0" + zlib.compress(LONG))),
    "3 MB of international text": behind_header(
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LONG))
    ),
    "a large ICC profile": behind_header(chunk(b"iCCP", b"profile\0\0" + zlib.compress(LONG))),
    "text behind the pixels": PLAIN_PNG[:-12]
    + chunk(b"zTXt", b"Comment\0\0" + zlib.compress(LONG))
    + PLAIN_PNG[-12:],
    "a damaged comment": behind_header(chunk(b"tEXt", b"Comment\0words")[:-1] + b"?"),
    "much text in many chunks": behind_header(
        *[
            chunk(b"zTXt", b"k%d\0\0" % number + zlib.compress(bytes(900_000)))
            for number in range(80)
        ]
    ),
}


@pytest.mark.parametrize("name", PNGS)
def test_pngs_with_whole_pixels_are_kept(name):
    expected = np.asarray(real_picture())
    np.testing.assert_array_equal(decode_image(PNGS[name]), expected)
    np.testing.assert_array_equal(decode_rgb(PNGS[name]), expected)


@pytest.mark.parametrize("name", PNGS)
def test_cut_and_damaged_pngs_are_refused(name):
    content = PNGS[name]
    place = content.index(b"IDAT") + 100
    with pytest.raises(RefusedImageError, match="truncated"):
        decode_image(content[:place])
    with pytest.raises(RefusedImageError, match="truncated"):
        decode_image(content[:-12])
    with pytest.raises(RefusedImageError, match="damaged"):
        decode_image(with_byte(content, place, content[place] ^ 0xFF))


def test_a_chunk_of_pixels_that_became_another_is_damage():
    """A flipped bit in its name makes the chunk of a palette one that decoders skip."""
    content = encoded(real_picture().quantize(16), "PNG")
    for kind in (b"PLTE", b"IDAT"):
        lower = content.replace(kind, bytes((kind[0] | 0x20,)) + kind[1:], 1)
        with pytest.raises(RefusedImageError):
            decode_image(lower)


def test_progressive_files_keep_their_scans():
    progressive = encoded(real_picture(), "JPEG", progressive=True, quality=90)
    odd = behind_start(progressive, segment(0xE2, b"ICC_PROFILE\0\3\2abcd"))
    np.testing.assert_array_equal(decode_image(odd), decode_image(progressive))
    with pytest.raises(RefusedImageError, match="truncated"):
        decode_image(odd[:-300])


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", PLAIN_JPEG[:30], b"\x89PNG"])
def test_stubs_have_no_pixels(content):
    assert pixels_of_jpeg(content) is None
    assert pixels_of_png(content) is None


def test_odd_files_become_shards(tmp_path):
    files = {f"a/{place:02d}.jpg": content for place, content in enumerate(JPEGS.values())}
    files |= {f"a/{place:02d}.png": content for place, content in enumerate(PNGS.values())}
    cut = JPEGS["Se = 0 (Samsung)"][:-200]
    root = write_folder(tmp_path / "images", files | {"a/cut.jpg": cut})
    assert main(["jpeg", str(root), "--out", str(tmp_path / "out")]) == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.num_samples == len(files)
    assert manifest.skipped == {"truncated": 1}
    reader = ShardReader(tmp_path / "out" / manifest.shards[0].name)
    for number, source in enumerate(reader.index.sources):
        if source.endswith(".jpg"):  # byte for byte
            assert reader.read(number).tobytes() == files[source]
