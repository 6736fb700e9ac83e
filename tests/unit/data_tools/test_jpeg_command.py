"""`jpeg`: image folders to JPEG shards, read back as in training."""

import io

import labelled_files
import numpy as np
import pytest
import webdataset
from image_files import bad_files, encoded, real_jpegs, real_picture
from image_sources import looks
from PIL import Image

from data_tools.__main__ import main
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset


@pytest.fixture
def images(tmp_path):
    """Six JPEGs in two classes, a PNG, and the bad files."""
    root = tmp_path / "images"
    for number, path in enumerate(real_jpegs()[:6]):
        folder = root / ("cats", "dogs")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.open(path).convert("RGB").resize((60, 40 + number))
        (folder / f"{number}.jpg").write_bytes(encoded(small, "JPEG"))
    (root / "dogs" / "plain.png").write_bytes(encoded(real_picture(), "PNG"))
    for name, (content, _) in bad_files().items():
        (root / "dogs" / name).write_bytes(content)
    return root


def test_jpeg_files_are_stored_unchanged(images, tmp_path):
    out = tmp_path / "out"
    assert main(["jpeg", str(images), "--out", str(out)]) == 0
    originals = {path.read_bytes() for path in images.rglob("*.jpg")}
    stored = [
        s["jpg"] for s in webdataset.WebDataset(str(out / "shard-000000.tar"), shardshuffle=0)
    ]
    # The six JPEGs are unchanged; a PNG was encoded, and one that is too thin rejected.
    kept = [content for content in stored if content in originals]
    assert len(kept) == 6
    others = [content for content in stored if content not in originals]
    shapes = {np.asarray(Image.open(io.BytesIO(content))).shape for content in others}
    assert shapes == {(64, 96, 3)}
    assert Manifest.read(out).skipped["aspect ratio above 64"] == 1
    assert Manifest.read(out).image_size is None
    dataset = ShardDataset(out, Transform(image_size=24, crop="center"))
    pixels, labels = dataset.read(np.arange(len(dataset)))
    assert pixels.shape == (len(dataset), 24, 24, 3)
    assert set(labels.tolist()) == {0, 1}
    assert main(["verify", str(out)]) == 0


def test_jpeg_files_of_the_wanted_size_are_stored_unchanged(tmp_path):
    """Data sets of one size, such as CIFAR's images as JPEG, then need no crop in training."""
    originals = set()
    (tmp_path / "images" / "cats").mkdir(parents=True)
    for number, side in enumerate((32, 32, 40)):
        content = encoded(real_picture().resize((side, side)).rotate(90 * number), "JPEG")
        (tmp_path / "images" / "cats" / f"{number}.jpg").write_bytes(content)
        originals.add(content)
    out = tmp_path / "out"
    assert main(["jpeg", str(tmp_path / "images"), "--out", str(out), "--size", "32"]) == 0
    stored = {
        s["jpg"] for s in webdataset.WebDataset(str(out / "shard-000000.tar"), shardshuffle=0)
    }
    assert len(stored) == 3
    assert len(stored & originals) == 2
    assert Manifest.read(out).image_size == 32
    assert ShardDataset(out).read(np.arange(3))[0].shape == (3, 32, 32, 3)


def test_resized_images_match_pillow(images, tmp_path):
    out = tmp_path / "out"
    assert main(["jpeg", str(images), "--out", str(out), "--size", "20", "--quality", "100"]) == 0
    dataset = ShardDataset(out)
    pixels, _ = dataset.read(np.arange(len(dataset)))
    picture = Image.open(images / "cats" / "0.jpg").convert("RGB")
    resized = picture.resize((30, 20), Image.Resampling.BICUBIC).crop((5, 0, 25, 20))
    errors = [np.abs(image.astype(int) - np.asarray(resized)).mean() for image in pixels]
    assert min(errors) < 2.0  # of 255, by JPEG of quality 100
    assert main(["verify", str(out)]) == 0
    assert main(["inspect", str(out), "--out", str(tmp_path / "sheet.png"), "--count", "4"]) == 0


def test_several_sizes_equal_single_runs(images, tmp_path):
    out = tmp_path / "out"
    assert main(["jpeg", str(images), "--out", str(out), "--size", "16", "24"]) == 0
    for size in ("16", "24"):
        alone = tmp_path / f"alone-{size}"
        assert main(["jpeg", str(images), "--out", str(alone), "--size", size]) == 0
        name = "shard-000000.tar"
        assert (out / size / name).read_bytes() == (alone / name).read_bytes()
        assert Manifest.read(out / size).image_size == int(size)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "0"], "--size: '0' is not a whole number from 1 to 13377"),
        (["--size", "8", "100000"], "--size: '100000' is not a whole number from 1 to 13377"),
        (["--quality", "0"], "--quality: '0' is not a whole number from 1 to 100"),
    ],
)
def test_errors_are_one_line(images, tmp_path, capsys, words, message):
    assert main(["jpeg", str(images), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar100_python"])
def test_cifar_without_loss(name, tmp_path):
    """Every part of CIFAR, as the presets of MP3 and GVP read it: the authors' pixels."""
    root = tmp_path / "data"
    root.mkdir()
    expected = getattr(labelled_files, f"write_{name}")(root)
    for split, options in (("train", ["--split", "all"]), ("test", ["--split", "test"])):
        out = tmp_path / split
        words = ["jpeg", str(root), *options, "--out", str(out), "--size", "32", "--lossless"]
        assert main(words) == 0
        pixels, labels = ShardDataset(out, Transform(image_size=32)).read(
            np.arange(len(expected[split]))
        )
        found = looks(zip(labels.tolist(), pixels, strict=True))
        assert found == looks(expected[split])
        assert main(["verify", str(out)]) == 0
        tar = webdataset.WebDataset(str(out / "shard-000000.tar"), shardshuffle=0).decode("rgb8")
        assert all(sample["jpg"].shape == (32, 32, 3) for sample in tar)
    with_loss = ["jpeg", str(root), "--out", str(tmp_path / "lossy"), "--size", "32"]
    assert main(with_loss) == 0
    lossy, _ = ShardDataset(tmp_path / "lossy").read(np.arange(4))
    assert {image.tobytes() for image in lossy}.isdisjoint(
        {pixels.tobytes() for _, pixels in expected["train"]}
    )


def test_lossless_keeps_jpeg_files(images, tmp_path):
    """Without --size, JPEG files stay as they are and others are stored as PNG."""
    out = tmp_path / "out"
    assert main(["jpeg", str(images), "--out", str(out), "--lossless"]) == 0
    stored = webdataset.WebDataset(str(out / "shard-000000.tar"), shardshuffle=0)
    contents = [sample["jpg"] for sample in stored]
    assert {path.read_bytes() for path in (images / "cats").glob("*.jpg")} <= set(contents)
    plain = np.asarray(Image.open(images / "dogs" / "plain.png"))
    decoded = [np.asarray(Image.open(io.BytesIO(content))) for content in contents]
    assert any(np.array_equal(pixels, plain) for pixels in decoded)


def test_lossless_and_quality_exclude_each_other(images, tmp_path, capsys):
    words = ["jpeg", str(images), "--out", str(tmp_path / "out"), "--lossless", "--quality", "90"]
    assert main(words) == 2
    assert "not allowed with argument --lossless" in capsys.readouterr().err
