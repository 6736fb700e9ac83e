"""Photographs in rare formats and under odd names, and images of more pixels than memory holds."""

import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
from image_files import encoded, real_picture
from image_sources import small_jpeg, write_folder
from PIL import Image, ImageCms

from data_tools.__main__ import main
from data_tools.decode import RefusedImageError, decode_image
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once

SIDE = 20_000


def difference(content):
    """Return the mean absolute difference of a file's pixels from the real picture's."""
    return np.abs(decode_image(content).astype(int) - np.asarray(real_picture())).mean()


def two_pictures():
    """Return the bytes of a file of two photographs, as stereo cameras and some phones write."""
    written, picture = io.BytesIO(), real_picture()
    picture.save(written, "MPO", save_all=True, append_images=[picture.rotate(180)], quality=95)
    return written.getvalue()


def in_lab():
    """Return the picture in CIE L*a*b*, converted by LittleCMS."""
    spaces = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
    return ImageCms.applyTransform(real_picture(), ImageCms.buildTransform(*spaces, "RGB", "LAB"))


def test_a_file_of_two_photographs_is_its_first():
    # The loss of JPEG; the second, upside down, differs by 60.
    assert difference(two_pictures()) < 5


def test_lab():
    # L*a*b* in 8 bits rounds.
    assert difference(encoded(in_lab(), "TIFF")) < 1


@pytest.mark.parametrize("bare", [False, True], ids=["jp2", "codestream"])
def test_jpeg_2000(bare):
    assert difference(encoded(real_picture(), "JPEG2000", no_jp2=bare)) == 0


def test_other_color_spaces_of_tiff():
    for mode in ("CMYK", "YCbCr"):
        assert difference(encoded(real_picture().convert(mode), "TIFF")) < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])  # Pillow's own reader, and libtiff
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "I;16"])
def test_orientation_of_tiff_is_ignored(orientation, compression, mode):
    numbers = np.arange(6 * 4, dtype=np.uint8).reshape(6, 4)
    picture = Image.fromarray(numbers * 10)
    if mode == "I;16":
        picture = Image.fromarray(numbers.astype(np.uint16) * 2570)
    elif mode != "L":
        picture = picture.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture, "TIFF", exif=exif, compression=compression)
    assert (decode_image(content) == numbers[..., None] * 10).all()


def test_numbers_of_unknown_range():
    """As 16-bit numbers, those of a TIFF of 32 bits would be nearly black."""
    numbers = np.arange(48, dtype=np.int32).reshape(6, 8) * 5
    for each in (numbers, numbers.astype(np.float32)):
        with pytest.raises(RefusedImageError, match="unsupported pixel format"):
            decode_image(encoded(Image.fromarray(each), "TIFF"))
    grey = np.arange(0, 65536, 1366, dtype=np.uint16).reshape(6, 8)
    expected = np.round(grey / 257)[..., None]
    assert (decode_image(b"P5 8 6 65535\n" + grey.astype(">u2").tobytes()) == expected).all()
    for image_format in ("PNG", "TIFF"):
        assert (decode_image(encoded(Image.fromarray(grey), image_format)) == expected).all()


def png_of_size(width, height):
    """Return a PNG whose header names a size, and which has the pixels of no image."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def jpeg_of_size(width, height):
    """Return a JPEG whose header names another size than its pixels have."""
    content = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def tiff_of_size(width, height):
    """Return a TIFF whose header names another size than its pixels have."""
    content = bytearray(encoded(Image.new("L", (16, 16)), "TIFF"))
    (place,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, place)
    for number in range(count):
        tag = place + 2 + 12 * number
        (name,) = struct.unpack_from("<H", content, tag)
        if name in (256, 257):
            struct.pack_into("<HII", content, tag + 2, 4, 1, width if name == 256 else height)
    return bytes(content)


@pytest.mark.parametrize("write", [png_of_size, jpeg_of_size, tiff_of_size])
def test_a_bomb_is_refused_by_its_header(write):
    """Before its 400 million pixels are decoded."""
    with pytest.raises(RefusedImageError, match="too large"):
        decode_image(write(SIDE, SIDE))


ODD_NAMES = {
    "upper case": b"UP.JPG",
    "dots": b"a.b.c.jpeg",
    "a newline": b"new\nline.jpg",
    "no UTF-8": b"caf\xe9.jpg",
    "spaces": b" a picture .png",
    "no suffix": b"picture",
    "quotes": b'it\'s "one".jpg',
    "a hash": b"#1 100%.jpg",
}


def test_odd_names_of_files(tmp_path, capsys):
    root = write_folder(tmp_path / "my pictures", {"cat/._UP.JPG": b"\0\5\x16\7"})
    for number, name in enumerate(ODD_NAMES.values()):
        with open(os.fsencode(root / "cat") + b"/" + name, "wb") as file:
            file.write(small_jpeg(number))
    out = tmp_path / "the shards"
    assert main(["jpeg", str(root), "--out", str(out)]) == 0
    assert Manifest.read(out).num_samples == len(ODD_NAMES)
    assert Manifest.read(out).skipped == {}
    names = json.loads((out / "shard-000000.index.json").read_text())["sources"]
    assert len(set(names)) == len(ODD_NAMES)
    assert {"cat/caf\\xe9.jpg", "cat/new\\nline.jpg", "cat/UP.JPG"} <= set(names)
    assert main(["verify", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{len(ODD_NAMES)} samples in 1 shard, all good" in said


def test_odd_names_of_refused_files_and_of_classes(tmp_path, capsys):
    """A newline in a name breaks no line, and an escape sequence does not reach the terminal."""
    root = write_folder(tmp_path / "images", {"a\nb/good.jpg": small_jpeg(0)})
    (root / "a\nb" / "not\nan\x1b[2J image.jpg").write_bytes(b"text")
    os.mkdir(os.fsencode(root) + b"/sch\xf6n")
    with open(os.fsencode(root) + b"/sch\xf6n/b.jpg", "wb") as file:
        file.write(small_jpeg(1))
    write_folder(root, {"größe\u3000大/c.jpg": small_jpeg(2)})
    assert main(["jpeg", str(root), "--out", str(tmp_path / "out")]) == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.class_names == ("a\\nb", "größe\u3000大", "sch\\xf6n")
    assert manifest.skipped == {"not an image": 1}
    said = capsys.readouterr().out
    assert "3 classes (a\\nb, größe\u3000大, sch\\xf6n)" in said
    assert "(the first: a\\nb/not\\nan\\x1b[2J image.jpg)" in said
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_three_thousand_classes(tmp_path, capsys):
    content = small_jpeg(0)
    root = write_folder(tmp_path / "images", {f"{n:04d}/a.jpg": content for n in range(3000)})
    assert main(["jpeg", str(root), "--out", str(tmp_path / "out")]) == 0
    assert "3,000 images, 3,000 classes (0000, 0001, 0002, ...)" in capsys.readouterr().out
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.class_names == tuple(f"{number:04d}" for number in range(3000))
    index = json.loads((tmp_path / "out" / "shard-000000.index.json").read_text())
    labels = {
        int(name.split("/")[0]): label
        for name, label in zip(index["sources"], index["labels"], strict=True)
    }
    assert labels == {number: number for number in range(3000)}


def test_of_many_rejected_files_the_report_names_some(tmp_path):
    """The indexes of the shards name all: a hundred million images may have millions."""
    files = {f"{number:03d}.jpg": b"" for number in range(150)}
    write_folder(tmp_path / "set", files | {"good.jpg": small_jpeg(0)})
    out = tmp_path / "out"
    assert main(["jpeg", str(tmp_path / "set"), "--out", str(out)]) == 0
    assert Manifest.read(out).skipped == {"zero bytes": 150}
    report = json.loads((out / "report.json").read_text())
    index = json.loads((out / "shard-000000.index.json").read_text())
    assert len(report["skipped"]["zero bytes"]) == 100
    assert {name for name, _ in index["skipped"]} == set(files)
    assert report["num_files"] == 151
