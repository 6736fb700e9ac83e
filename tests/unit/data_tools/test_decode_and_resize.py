"""Decoding and resizing of all image formats, and reasons for refused files."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from image_files import bad_files, encoded, png, real_jpegs, real_picture, sixteen_bit_rgb_png
from PIL import Image

from data_tools import decode, shard_tasks
from data_tools.decode import RefusedImageError, decode_image, decoder_versions
from data_tools.resize import resize_and_crop
from data_tools.sources import SourceImage

pytestmark = pytest.mark.once


def test_jpegs_match_pillow():
    for path in real_jpegs()[:6]:
        expected = np.asarray(Image.open(path).convert("RGB"))
        assert (decode_image(path.read_bytes()) == expected).all()


@pytest.mark.parametrize("by_pillow", [False, True])
def test_jpeg_colour_spaces(by_pillow, monkeypatch):
    if by_pillow:
        monkeypatch.setattr(decode, "_decode_jpeg", lambda content, min_side: None)
    picture = real_picture()
    for options in ({}, {"progressive": True}, {"subsampling": 0}):
        content = encoded(picture, "JPEG", quality=95, **options)
        pixels = decode_image(content)
        assert pixels.shape == (64, 96, 3)
        assert np.abs(pixels.astype(int) - np.asarray(picture)).mean() < 4
    grey = decode_image(encoded(picture.convert("L"), "JPEG", quality=95))
    assert (grey[..., 0] == grey[..., 2]).all()
    assert np.abs(grey[..., 0].astype(int) - np.asarray(picture.convert("L"))).mean() < 2
    cmyk = decode_image(encoded(picture.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(cmyk.astype(int) - np.asarray(picture)).mean() < 4


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats(kind):
    picture = real_picture()
    assert (decode_image(encoded(picture, kind)) == np.asarray(picture)).all()


def test_grey_and_palette_images():
    picture = real_picture()
    for mode in ("L", "1"):
        expected = np.asarray(picture.convert(mode).convert("RGB"))
        assert (decode_image(encoded(picture.convert(mode), "PNG")) == expected).all()
    with_palette = picture.convert("P", palette=Image.Palette.ADAPTIVE)
    expected = np.asarray(with_palette.convert("RGB"))
    assert (decode_image(encoded(with_palette, "PNG")) == expected).all()


def test_alpha_is_composited_on_white():
    random = np.random.default_rng(0)
    values = random.integers(0, 256, (9, 7, 4), dtype=np.uint8)
    share = values[..., 3:] / 255
    expected = values[..., :3] * share + 255 * (1 - share)
    pixels = decode_image(encoded(Image.fromarray(values), "PNG"))
    assert np.abs(pixels - expected).max() <= 1
    grey = decode_image(encoded(Image.fromarray(values[..., 2:], "LA"), "PNG"))
    assert np.abs(grey - (values[..., 2:3] * share + 255 * (1 - share))).max() <= 1


def test_transparent_palette_colour_becomes_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 1), 1)
    pixels = decode_image(encoded(image, "PNG", transparency=0))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 1].tolist() == [200, 100, 50]


@pytest.mark.parametrize(
    ("bits", "values", "key", "greys"),
    [
        (16, [0, 999, 1000, 65535], 1000, [0, 4, 255, 255]),
        (8, [0, 1, 2, 255], 1, [0, 255, 2, 255]),
        (4, [0, 1, 2, 15], 2, [0, 17, 255, 255]),
        (2, [0, 1, 2, 3], 0, [255, 85, 170, 255]),
        (1, [0, 1, 1, 0], 0, [255, 255, 255, 255]),
    ],
)
def test_transparent_grey_becomes_white(bits, values, key, greys):
    packed = sum(value << bits * place for place, value in enumerate(reversed(values)))
    row = (packed << -4 * bits % 8).to_bytes(-(-4 * bits // 8), "big")
    pixels = decode_image(png(4, 1, bits, 0, [row], key.to_bytes(2, "big")))
    assert pixels.tolist() == [[[grey] * 3 for grey in greys]]


def test_transparent_colour_of_16_bits_becomes_white():
    colors = np.array([[0x1234, 0x5678, 0x9ABC], [0x2234, 0x5678, 0x9ABC]], ">u2")
    pixels = decode_image(png(2, 1, 16, 2, [colors.tobytes()], colors[0].tobytes()))
    assert pixels.tolist() == [[[255, 255, 255], [0x22, 0x56, 0x9A]]]


def bitmap(layers):
    """Return a BMP file with a header of version 5 and a mask of alpha, of uint8 `[h, w, 4]`."""
    height, width, _ = layers.shape
    masks = (0xFF << 16, 0xFF << 8, 0xFF, 0xFF << 24)
    header = struct.pack("<IiiHHIIiiII", 124, width, -height, 1, 32, 3, 0, 0, 0, 0, 0)
    header += struct.pack("<4I4s", *masks, b"BGRs") + bytes(124 - 60)
    pixels = layers[..., [2, 1, 0, 3]].tobytes()
    return struct.pack("<2sIHHI", b"BM", 138 + len(pixels), 0, 0, 138) + header + pixels


def test_a_bitmap_without_any_opaque_pixel_has_no_alpha():
    """As in browsers: many programs leave the fourth byte of a pixel at zero."""
    layers = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    layers[..., 3] = 0
    assert (decode_image(bitmap(layers)) == layers[..., :3]).all()
    layers[2, 3, 3] = 255
    pixels = decode_image(bitmap(layers))
    assert (pixels[2, 3] == layers[2, 3, :3]).all()
    assert (np.delete(pixels.reshape(-1, 3), 2 * 7 + 3, 0) == 255).all()
    assert (decode_image(encoded(Image.new("RGBA", (3, 3)), "PNG")) == 255).all()


def test_16_bit_images_are_scaled():
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(encoded(Image.fromarray(values), kind))
        assert (pixels[..., 1] == np.rint(values / 257)).all()
    values = values[::31, ::31]
    color = np.stack([values, values[::-1], values.T], axis=-1)
    pixels = decode_image(sixteen_bit_rgb_png(color))
    assert np.abs(pixels - color / 257).max() <= 1


def grey_tiff(width, bits, photometric, row):
    """Return a TIFF of one row without compression; `photometric`: 1 if zero is black, 0 if white.

    Each tag has a number, a type (3: uint16), a count and a value.
    """
    values = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1}
    values[279] = len(row)
    tags = b"".join(struct.pack("<HHIHH", tag, 3, 1, values[tag], 0) for tag in values)
    row += bytes(len(row) % 2)
    head = struct.pack("<4sI", b"II*\0", 8 + len(row)) + row
    return head + struct.pack("<H", len(values)) + tags + bytes(4)


@pytest.mark.parametrize(
    ("bits", "photometric", "row", "greys"),
    [
        (8, 0, bytes([0, 1, 255]), [255, 254, 0]),
        (16, 1, struct.pack("<3H", 0, 1000, 65535), [0, 4, 255]),
        (16, 0, struct.pack("<3H", 0, 1000, 65535), [255, 251, 0]),
        # Two numbers in three bytes, the high bits first: 0, 2048, 4095 and padding.
        (12, 1, bytes([0x00, 0x08, 0x00, 0xFF, 0xF0]), [0, 128, 255]),
    ],
)
def test_greys_of_a_tiff(bits, photometric, row, greys):
    """Pillow inverts only greys of up to 8 bits, and leaves 12 bits as they are."""
    pixels = decode_image(grey_tiff(len(greys), bits, photometric, row))
    assert pixels.tolist() == [[[grey] * 3 for grey in greys]]


def test_strips_of_an_image_are_converted_alike(monkeypatch):
    """A strip at a time, since whole copies of a large image take gigabytes."""
    random = np.random.default_rng(0)
    layers = Image.fromarray(random.integers(0, 256, (9, 7, 4), dtype=np.uint8))
    greys = Image.fromarray(random.integers(0, 65536, (9, 7), dtype=np.uint16))
    files = [encoded(layers, "PNG"), encoded(layers.quantize(8), "PNG"), encoded(greys, "PNG")]
    whole = [decode_image(file) for file in files]
    monkeypatch.setattr(decode, "_STRIP_ROWS", 2)
    for file, expected in zip(files, whole, strict=True):
        assert (decode_image(file) == expected).all()
    white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
    assert (whole[0] == np.asarray(Image.alpha_composite(white, layers).convert("RGB"))).all()


def test_large_files_are_not_kept_together(monkeypatch):
    monkeypatch.setattr(shard_tasks, "_MOST_BYTES_AT_ONCE", 10)
    sizes = [1, 2, 3, 4, 30, 1, 9, 1]
    pictures = [SourceImage(str(i), str(i), -1, bytes(size)) for i, size in enumerate(sizes)]
    batches = [[len(each.content) for each in b] for b in shard_tasks._batches(iter(pictures), 3)]
    assert batches == [[1, 2, 3], [4, 30], [1, 9], [1]]


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), color) for color in ((250, 0, 0), (0, 250, 0))]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode_image(content)[3, 3].tolist() == [250, 0, 0]


@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_refused_with_a_reason(name):
    content, reason = bad_files()[name]
    with pytest.raises(RefusedImageError) as caught:
        resize_and_crop(decode_image(content), size=8, library="torch")
    if reason is not None:
        assert str(caught.value) == reason
    assert str(caught.value) in {
        "zero bytes",
        "not an image",
        "truncated",
        "damaged",
        "unsupported pixel format",
        "aspect ratio above 64",
    }


def test_too_many_pixels(monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 1000)
    for kind in ("JPEG", "PNG"):
        with pytest.raises(RefusedImageError, match="too large"):
            decode_image(encoded(real_picture(), kind))


def test_postscript_is_refused():
    with pytest.raises(RefusedImageError, match="not an image"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")


@pytest.mark.parametrize(("width", "height"), [(96, 64), (64, 96), (64, 64), (20, 33), (500, 375)])
@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("library", ["torch", "pillow"])
def test_resize_matches_pillow(width, height, size, library):
    picture = Image.open(real_jpegs()[1]).convert("RGB").resize((width, height))
    shorter = min(width, height)
    resized = picture.resize(
        (round(width * size / shorter), round(height * size / shorter)), Image.Resampling.BICUBIC
    )
    top, left = (resized.height - size) // 2, (resized.width - size) // 2
    expected = np.asarray(resized)[top : top + size, left : left + size].astype(int)
    difference = np.abs(resize_and_crop(np.asarray(picture), size=size, library=library) - expected)
    # torch sums in another order than Pillow, so a few values differ by one.
    assert difference.max() <= (library == "torch")
    assert (difference > 0).mean() < 0.02


def test_bytes_do_not_depend_on_the_instruction_set():
    """torch has a kernel for AVX2 and one for other processors."""
    program = """if True:
        import hashlib, numpy as np, torch
        from data_tools.resize import resize_and_crop
        random, digest = np.random.default_rng(0), hashlib.sha256()
        for height, width in random.integers(20, 500, (10, 2)):
            image = random.integers(0, 256, (height, width, 3), np.uint8)
            digest.update(resize_and_crop(image, size=64, library="torch").tobytes())
        print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
    """
    found = []
    for capability in ("default", None):
        variables = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | variables,
            check=True,
            capture_output=True,
            text=True,
        )
        assert not answer.stderr
        found.append(answer.stdout.split())
    assert found[0][0] == "DEFAULT"
    assert found[0][1] == found[1][1]


def test_decoder_versions():
    assert set(decoder_versions()) == {"pillow", "simplejpeg"}
