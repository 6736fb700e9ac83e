"""`maps semantic` on folders as ADE20K and PASCAL VOC publish them."""

import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data_tools.__main__ import main
from data_tools.label_maps import read_class_names, read_semantic
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import decode_png, split
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once

ADE = (
    "Idx\tRatio\tTrain\tVal\tStuff\tName\n"
    "1\t0.15\t11664\t1172\t1\twall\n2\t0.1\t6046\t612\t1\tsky, air\n"
)


@pytest.fixture
def folders(tmp_path):
    """Return a function that writes images and maps of one PNG mode."""

    def write(maps, mode="L"):
        random = np.random.default_rng(0)
        for name in ("images", "maps"):
            (tmp_path / name).mkdir()
        for number, values in enumerate(maps):
            height, width = values.shape
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.jpg")
            picture = Image.fromarray(values.astype(np.uint8))
            if mode == "P":
                picture.putpalette([7 * i % 256 for i in range(768)])
            picture.save(tmp_path / "maps" / f"{number}.png")
        return tmp_path

    return write


def run(folder, *words):
    maps = [str(folder / name) for name in ("images", "maps")]
    return main(["maps", "semantic", *maps, "--out", str(folder / "out"), *words])


def stored(folder):
    """Return the stored maps, uint8 `[h, w, 3]`, in the order of the images."""
    (shard,) = Manifest.read(folder / "out").shards
    reader = ShardReader(folder / "out" / shard.name)
    found = {
        source: decode_png(split(bytes(reader.read(place)))[1])
        for place, source in enumerate(reader.index.sources)
    }
    return [found[name] for name in sorted(found)]


def test_ade20k_numbers_classes_from_one(folders):
    values = np.array([[0, 1], [2, 2], [1, 0]])
    folder = folders([values, values[:2]])
    (folder / "objectInfo150.txt").write_text(ADE)
    assert run(folder, "--classes", str(folder / "objectInfo150.txt")) == 0
    target = json.loads((folder / "out" / "manifest.json").read_text())["target"]
    assert (target["kind"], target["class_names"]) == ("panoptic", ["wall", "sky, air"])
    first, second = stored(folder)
    assert first[..., 0].tolist() == values.tolist()
    # A class is one segment, and void none.
    assert first[..., 1].tolist() == values.tolist()
    assert not first[..., 2].any()
    assert second.shape == (2, 2, 3)


def test_voc_numbers_classes_from_zero_in_a_palette(folders):
    values = np.array([[0, 255], [1, 0]])
    folder = folders([values], mode="P")
    (folder / "names.txt").write_text("background\naeroplane\n")
    assert run(folder, "--classes", str(folder / "names.txt"), "--void", "255") == 0
    assert stored(folder)[0][..., 0].tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((2, 2), 3), "label map: number beyond the classes of --classes"),
        (np.zeros((2, 2, 3), int), "label map: no PNG of one number a pixel"),
    ],
)
def test_wrong_maps_are_counted_by_reason(folders, capfd, values, message):
    folder = folders([np.array([[1, 1], [2, 2]])])
    pixels = np.zeros((2, 2, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "images" / "other.jpg")
    Image.fromarray(values.astype(np.uint8)).save(folder / "maps" / "other.png")
    (folder / "names.txt").write_text("wall\nsky\n")
    assert run(folder, "--classes", str(folder / "names.txt")) == 0
    assert message in "".join(capfd.readouterr())
    assert len(stored(folder)) == 1


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_numbers_of_any_bit_depth(depth):
    """Pillow scales greys of 2 and 4 bits to 255; the numbers of a map are those in the file."""
    values = np.arange(16).reshape(2, 8) % min(2**depth, 16)
    bits = [list(np.binary_repr(value, depth)) for value in values.flat]
    rows = np.packbits(np.array(bits, np.uint8).reshape(2, -1), axis=1)
    header = struct.pack(">IIBBBBB", 8, 2, depth, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    assert (read_semantic(png, num_classes=255, void=0) == values + 256 * values).all()


def test_class_lists_that_are_wrong_are_refused(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("wall\nwall\n")
    with pytest.raises(UserError, match="line 2: 'wall' was on line 1 already"):
        read_class_names(path)
    path.write_text("".join(f"class {number}\n" for number in range(256)))
    with pytest.raises(UserError, match="has 256 classes, over 255"):
        read_class_names(path)
    path.write_text("")
    with pytest.raises(UserError, match="is empty"):
        read_class_names(path)
