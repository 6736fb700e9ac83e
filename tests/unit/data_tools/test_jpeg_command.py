"""`jpeg`: image folders to JPEG shards, read back as in training."""

import io

import numpy as np
import pytest
import webdataset
from image_files import bad_files, encoded, real_jpegs, real_picture
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
    [(["--size", "0"], "--size must be at least 1"), (["--quality", "0"], "--quality must lie in")],
)
def test_errors_are_one_line(images, tmp_path, capsys, words, message):
    assert main(["jpeg", str(images), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
