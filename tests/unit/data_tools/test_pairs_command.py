"""`pairs`: shards from two folders of equal file names, read back as in training."""

import json

import numpy as np
import pytest
from image_files import encoded, real_picture, tree
from PIL import Image

from data_tools.__main__ import main
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once


def labels_of(picture, step):
    """Return a map of three labels in vertical stripes."""
    width, height = picture.size
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    return Image.fromarray(colours[np.tile(np.arange(width) // step % 3, (height, 1))])


@pytest.fixture
def folders(tmp_path):
    """Six good pairs in two classes, and a bad pair of each kind."""
    images, targets = tmp_path / "images", tmp_path / "targets"
    for number in range(6):
        picture = real_picture().rotate(90 * number, expand=True)
        name = f"{('cats', 'dogs')[number % 2]}/{number}"
        write(images, f"{name}.jpg", encoded(picture, "JPEG"))
        write(targets, f"{name}.png", encoded(labels_of(picture, 5 + number), "PNG"))
    good = encoded(real_picture(), "PNG")
    write(images, "dogs/alone.png", good)
    write(targets, "dogs/lost.png", good)
    write(images, "dogs/twice.jpg", encoded(real_picture(), "JPEG"))
    write(images, "dogs/twice.png", good)
    write(targets, "dogs/twice.png", good)
    write(images, "dogs/smaller.png", good)
    write(targets, "dogs/smaller.png", encoded(real_picture().resize((48, 32)), "PNG"))
    write(images, "dogs/text.png", b"this is no image")
    write(targets, "dogs/text.png", good)
    write(images, "dogs/half.png", good)
    write(targets, "dogs/half.png", good[:500])
    return images, targets


def write(root, name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make(folders, out, *words):
    return main(["pairs", *map(str, folders), "--out", str(out), "--size", "24", *words])


def test_pairs_match_pillow(folders, tmp_path):
    assert make(folders, tmp_path / "out", "--quality", "100") == 0
    manifest = Manifest.read(tmp_path / "out")
    assert (manifest.kind, manifest.image_size, manifest.num_samples) == ("pairs", 24, 6)
    assert manifest.class_names == ("cats", "dogs")
    assert manifest.skipped == {
        "image and target differ in size": 1,
        "image without a target": 1,
        "not an image": 1,
        "several files of this name": 2,
        "target without an image": 1,
        "target: truncated": 1,
    }
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["skipped"]["target without an image"] == ["dogs/lost.png"]
    dataset = ShardDataset(tmp_path / "out")
    pairs, _ = dataset.read(np.arange(6))
    images, targets = folders
    expected = []
    for number in range(6):
        name = f"{('cats', 'dogs')[number % 2]}/{number}"
        pair = []
        for path, filter_ in (
            (images / f"{name}.jpg", Image.Resampling.BICUBIC),
            (targets / f"{name}.png", Image.Resampling.NEAREST),
        ):
            picture = Image.open(path).convert("RGB")
            width, height = (round(side * 24 / min(picture.size)) for side in picture.size)
            left, top = (width - 24) // 2, (height - 24) // 2
            resized = picture.resize((width, height), filter_)
            pair.append(np.asarray(resized.crop((left, top, left + 24, top + 24))))
        expected.append(pair)
    for pair in pairs:
        [alike] = [one for one in expected if np.array_equal(one[1], pair[1])]
        assert np.abs(alike[0].astype(int) - pair[0]).mean() < 2.0  # of 255, by JPEG


def test_workers_reruns_and_reshard_are_deterministic(folders, tmp_path):
    words = ["--samples-per-shard", "4"]
    assert make(folders, tmp_path / "out", *words) == 0
    before = tree(tmp_path / "out")
    next((tmp_path / "out").glob("*.tar")).unlink()
    assert make(folders, tmp_path / "out", *words, "--workers", "2") == 0
    assert tree(tmp_path / "out") == before
    assert make(folders, tmp_path / "out", *words, "--target-resize", "bicubic") == 2
    assert main(["verify", str(tmp_path / "out")]) == 0
    one = ["reshard", str(tmp_path / "out"), "--out", str(tmp_path / "one")]
    assert main([*one, "--samples-per-shard", "100"]) == 0
    read = [ShardDataset(tmp_path / name).read(np.arange(6))[0] for name in ("out", "one")]
    assert np.array_equal(*read)
    sheet = tmp_path / "sheet.png"
    assert main(["inspect", str(tmp_path / "one"), "--out", str(sheet)]) == 0
    # Two columns and three rows of 48 by 24 pixels, enlarged twice.
    assert Image.open(sheet).size == (2 * 98 + 2, 3 * 50 + 2)


def test_pairs_are_cropped_and_flipped_alike(folders, tmp_path):
    images, _ = folders
    words = ["--quality", "100", "--target-resize", "bicubic"]
    assert make((images, images), tmp_path / "out", *words) == 0
    plain = ShardDataset(tmp_path / "out")
    positions = np.arange(40)
    moved = Transform(image_size=16, crop="window", flip=True, seed=3)
    pairs, _ = ShardDataset(tmp_path / "out", moved).read(positions % 6, positions=positions)
    assert pairs.shape == (40, 2, 16, 16, 3)
    # Image and target are the same file, stored as JPEG and lossless.
    assert np.abs(pairs[:, 0].astype(int) - pairs[:, 1]).mean() < 2.0
    whole, _ = plain.read(positions % 6)
    assert not np.array_equal(pairs[:6, 1], whole[:6, 1, 4:20, 4:20])
    draws = moved.draws(positions)
    for pair, one, draw in zip(pairs, whole, draws, strict=True):
        assert np.array_equal(pair[1], moved(one[1], draw))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "0"], "--size: '0' is not a whole number from 1 to 13377"),
        (["--size", "100000"], "--size: '100000' is not a whole number from 1 to 13377"),
        (["--quality", "101"], "--quality: '101' is not a whole number from 1 to 100"),
    ],
)
def test_invalid_options(folders, tmp_path, capsys, words, message):
    assert make(folders, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err


def test_invalid_folders(folders, tmp_path, capsys):
    images, targets = folders
    write(tmp_path / "other", "mouse.png", b"")
    assert make((images, tmp_path / "other"), tmp_path / "out") == 2
    assert "has the name of one in" in capsys.readouterr().err
    assert make(folders, targets / "out") == 2
    assert "lies inside the targets" in capsys.readouterr().err
    assert make((images, tmp_path / "none"), tmp_path / "out") == 2
    assert "is not a folder" in capsys.readouterr().err
