"""idx files, in which the authors of MNIST publish it: names, headers, labels, errors."""

from __future__ import annotations

import gzip
import subprocess
import sys

import numpy as np
import pytest
from image_sources import opened
from labelled_files import idx, write_mnist
from PIL import Image

from data_tools.__main__ import main
from data_tools.decode import decode_image
from data_tools.source_formats import find_layout
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once


def shown(source):
    """Return name, label and pixels of each image."""
    return [
        (picture.name, picture.label, decode_image(picture.content).tobytes())
        for part in source.parts(files_per_part=3, seed=0)
        for picture in part.pictures(pytest.fail)
    ]


@pytest.mark.parametrize("prefix", ["", "mnist_", "fashion-"])
@pytest.mark.parametrize("packed", [True, False])
def test_names_of_the_files(prefix, packed, tmp_path):
    """Plain or packed, with the prefixes under which copies and other sets are published."""
    expected = write_mnist(tmp_path, prefix=prefix, packed=packed)
    assert find_layout(tmp_path) == "mnist"
    found = shown(opened(tmp_path, "--split", "test"))
    wanted = [
        (f"t10k/{number:05d}", label, pixels.tobytes())
        for number, (label, pixels) in enumerate(expected["test"])
    ]
    assert sorted(found) == wanted


def test_plain_and_packed_files_are_one_source(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_mnist(tmp_path / "a")
    write_mnist(tmp_path / "b", packed=False)
    sources = [opened(tmp_path / name) for name in "ab"]
    assert sources[0].sha256 == sources[1].sha256
    assert shown(sources[0]) == shown(sources[1])


def test_images_of_any_size(tmp_path):
    """The sides are in the header: other sets in this format have others."""
    write_mnist(tmp_path, packed=False)
    wide = np.random.default_rng(7).integers(0, 256, (5, 20, 33), np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(wide))
    [first, *_] = sorted(shown(opened(tmp_path)))
    assert first[2] == np.repeat(wide[0][..., None], 3, -1).tobytes()


def rewrite(root, name, change):
    """Replace the unpacked content of a packed file."""
    path = root / f"{name}-ubyte.gz"
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


def cut_packed(root):
    path = root / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-40])


ERRORS = {
    "images where labels should be": (
        lambda r: (r / "train-labels-idx1-ubyte.gz").write_bytes(
            (r / "train-images-idx3-ubyte.gz").read_bytes()
        ),
        r"train-labels-idx1-ubyte.gz starts with 00000803, not 00000801.*labels",
    ),
    "labels where images should be": (
        lambda r: (r / "train-images-idx3-ubyte.gz").write_bytes(
            (r / "train-labels-idx1-ubyte.gz").read_bytes()
        ),
        r"train-images-idx3-ubyte.gz starts with 00000801, not 00000803.*images",
    ),
    "another file": (
        lambda r: rewrite(r, "train-images-idx3", lambda old: b"\x89PNG" + old),
        "starts with 89504e47, not 00000803",
    ),
    "an empty file": (
        lambda r: rewrite(r, "train-images-idx3", lambda old: b""),
        "starts with nothing, not 00000803",
    ),
    "a cut header": (
        lambda r: rewrite(r, "train-images-idx3", lambda old: old[:10]),
        "10 bytes.*header of 16",
    ),
    "images are cut": (
        lambda r: rewrite(r, "train-images-idx3", lambda old: old[:-1]),
        r"3935 bytes, not 3936.*5 images of 28 x 28.*truncated",
    ),
    "labels are cut": (
        lambda r: rewrite(r, "train-labels-idx1", lambda old: old[:-1]),
        r"12 bytes, not 13.*5 labels.*truncated",
    ),
    "more than announced": (
        lambda r: rewrite(r, "train-labels-idx1", lambda old: old + b"\1"),
        "14 bytes, not 13",
    ),
    "no images": (
        lambda r: rewrite(r, "train-images-idx3", lambda _: idx(np.zeros((0, 28, 28), np.uint8))),
        "no image",
    ),
    "counts differ": (
        lambda r: rewrite(r, "train-labels-idx1", lambda _: idx(np.zeros(4, np.uint8))),
        r"5 images.*train-labels-idx1-ubyte.gz.* 4 labels",
    ),
    "the packed file is cut": (cut_packed, "train-images-idx3-ubyte.gz.*cannot be unpacked"),
    "not packed at all": (
        lambda r: (r / "train-images-idx3-ubyte.gz").write_bytes(b"plain"),
        "cannot be unpacked",
    ),
    "labels are missing": (
        lambda r: (r / "train-labels-idx1-ubyte.gz").unlink(),
        r"train-labels-idx1-ubyte is missing, and so is train-labels-idx1-ubyte.gz",
    ),
    "label 10": (
        lambda r: rewrite(r, "train-labels-idx1", lambda old: old[:-1] + b"\x0a"),
        "label of train/00004 is number 10, counted from 0, and there are 10 classes",
    ),
    "EMNIST": (
        lambda r: [path.rename(r / f"emnist-digits-{path.name}") for path in [*r.iterdir()]],
        "emnist-digits-train-images-idx3-ubyte.gz is EMNIST, whose images are transposed",
    ),
    "two sets in a folder": (
        lambda r: write_mnist(r, prefix="fashion_"),
        "fashion_train-images-idx3-ubyte.gz and train-images-idx3-ubyte.gz",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_sentence(case, tmp_path):
    spoil, message = ERRORS[case]
    write_mnist(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_split_that_a_folder_lacks(tmp_path):
    """Only the test set was downloaded."""
    write_mnist(tmp_path)
    for name in ("images-idx3", "labels-idx1"):
        (tmp_path / f"train-{name}-ubyte.gz").unlink()
    assert len(opened(tmp_path, "--split", "test").files) == 5
    with pytest.raises(UserError, match="train-images-idx3-ubyte is missing"):
        opened(tmp_path)


def test_a_mistake_ends_with_one_line_and_code_2(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    words = [sys.executable, "-m", "data_tools", "jpeg", str(tmp_path), "--out"]
    done = subprocess.run([*words, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_lossless_shards_are_grey_png(tmp_path, capsys):
    folder = tmp_path / "mnist"
    folder.mkdir()
    expected = write_mnist(folder)
    words = ["jpeg", str(folder), "--split", "test", "--lossless", "--out", str(tmp_path / "s")]
    assert main(words) == 0
    assert "5 images, 10 classes" in capsys.readouterr().out
    manifest = Manifest.read(tmp_path / "s")
    assert manifest.class_names == tuple("0123456789")
    reader = ShardReader(tmp_path / "s" / manifest.shards[0].name)
    number = {source: place for place, source in enumerate(reader.index.sources)}
    tar = (tmp_path / "s" / manifest.shards[0].name).read_bytes()
    for place, (label, pixels) in enumerate(expected["test"]):
        row = number[f"t10k/{place:05d}"]
        assert reader.index.labels[row] == label
        start = reader.index.offsets[row]
        content = tar[start : start + reader.index.lengths[row]]
        path = tmp_path / "one.png"
        path.write_bytes(content)
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("PNG", "L")
            assert np.array_equal(np.asarray(image), pixels[..., 0])


def test_tokens_of_the_grey_palette_are_the_greys(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    expected = write_mnist(folder)
    assert main(["palette", "grey", "--out", str(tmp_path / "grey.npy")]) == 0
    palette = Palette.load(tmp_path / "grey.npy")
    greys = np.arange(256, dtype=np.uint8)[:, None].repeat(3, axis=1)
    assert np.array_equal(palette.decode(np.arange(256)), greys)
    assert np.array_equal(palette.encode(greys), np.arange(256))
    words = ["palette", "shards", str(folder), "--palette", str(tmp_path / "grey.npy")]
    assert main([*words, "--size", "28", "--split", "test", "--out", str(tmp_path / "s")]) == 0
    shards = ShardDataset(tmp_path / "s")
    tokens, labels = shards.read(np.arange(5))[:2]
    wanted = {pixels[..., 0].tobytes(): label for label, pixels in expected["test"]}
    found = {
        row.astype(np.uint8).tobytes(): int(label)
        for row, label in zip(tokens, labels, strict=True)
    }
    assert found == wanted


@pytest.mark.parametrize(("count", "spaced"), [(2, [0, 255]), (4, [0, 85, 170, 255]), (1, [0])])
def test_fewer_greys_are_evenly_spaced(count, spaced, tmp_path):
    path = tmp_path / "grey.npy"
    assert main(["palette", "grey", "--num-colors", str(count), "--out", str(path)]) == 0
    assert Palette.load(path).decode(np.arange(count))[:, 0].tolist() == spaced


@pytest.mark.parametrize("count", ["0", "257", "-1"])
def test_impossible_numbers_of_greys(count, tmp_path, capsys):
    words = ["palette", "grey", "--num-colors", count, "--out", str(tmp_path / "grey.npy")]
    assert main(words) == 2
    message = f"--num-colors: '{count}' is not a whole number from 1 to 256"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "grey.npy").exists()
