"""Options of `palette shards`: several sizes, crops, fast decoding."""

from __future__ import annotations

import json

import numpy as np
import pytest
from image_files import encoded, real_jpegs
from PIL import Image

from data_tools import palette
from data_tools.__main__ import main
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three JPEGs of 400x300 and a palette."""
    root = tmp_path_factory.mktemp("options")
    (root / "images").mkdir()
    for number, path in enumerate(real_jpegs()[:3]):
        picture = Image.open(path).convert("RGB").resize((400, 300))
        (root / "images" / f"{number}.jpg").write_bytes(encoded(picture, "JPEG", quality=90))
    centers = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    Palette(centers).save(root / "palette.npy")
    return root


def shards(folder, out, *options):
    words = ["palette", "shards", str(folder / "images"), "--out", str(out)]
    return main([*words, "--palette", str(folder / "palette.npy"), *options])


def tokens_by_source(out):
    """File name -> tokens of its samples, in order."""
    dataset, found = ShardDataset(out), {}
    index = json.loads((out / "shard-000000.index.json").read_text())
    for number, source in enumerate(index["sources"]):
        found.setdefault(source, []).append(dataset.read(np.array([number]))[0][0])
    return found


def brute_force(square, centers):
    """Return the nearest colour of every pixel by brute force in float64."""
    points = np.asarray(square).reshape(-1, 1, 3) / 127.5 - 1
    return ((points - centers.astype(np.float64)) ** 2).sum(-1).argmin(-1)


def test_several_sizes_share_one_decode(folder, tmp_path, monkeypatch):
    decoded = []
    decode = palette.decode_image
    monkeypatch.setattr(
        palette,
        "decode_image",
        lambda content, **options: decoded.append(1) or decode(content, **options),
    )
    options = ["--crop", "evaluation", "--resize", "pillow"]
    assert shards(folder, tmp_path, "--size", "32", "48", "64", *options) == 0
    assert len(decoded) == 3
    centers = Palette.load(folder / "palette.npy").centers
    for size in (32, 48, 64):
        manifest = Manifest.read(tmp_path / str(size))
        assert manifest.image_size == size
        assert manifest.preparation.resize == "Pillow bicubic (antialiased)"
        assert "centre crop of 224" in manifest.preparation.crop
        for name, [tokens] in tokens_by_source(tmp_path / str(size)).items():
            picture = Image.open(folder / "images" / name).convert("RGB")
            large = picture.resize((299, 224), Image.Resampling.BICUBIC).crop((37, 0, 261, 224))
            square = large.resize((size, size), Image.Resampling.BICUBIC)
            assert np.array_equal(tokens, brute_force(square, centers))


def test_several_random_crops_per_image(folder, tmp_path):
    options = ("--size", "32", "--crop", "random", "--crops", "3")
    assert shards(folder, tmp_path / "a", *options) == 0
    assert shards(folder, tmp_path / "b", *options) == 0
    assert shards(folder, tmp_path / "c", *options, "--seed", "1") == 0
    first, second, other = (tokens_by_source(tmp_path / name) for name in "abc")
    for name, crops in first.items():
        assert len(crops) == 3
        assert len({crop.tobytes() for crop in crops}) == 3
        assert np.array_equal(crops, second[name])
        assert not np.array_equal(crops, other[name])
    assert Manifest.read(tmp_path / "a").preparation.crop.startswith("3 times: shorter side to a")


def test_fast_decoding(folder, tmp_path):
    assert shards(folder, tmp_path / "exact", "--size", "32") == 0
    assert shards(folder, tmp_path / "fast", "--size", "32", "--fast") == 0
    assert Manifest.read(tmp_path / "fast").preparation.resize.endswith("at a smaller scale")
    palette = Palette.load(folder / "palette.npy")
    exact, fast = (tokens_by_source(tmp_path / name) for name in ("exact", "fast"))
    for name, [tokens] in exact.items():
        assert not np.array_equal(tokens, fast[name][0])
        difference = palette.decode(tokens).astype(int) - palette.decode(fast[name][0])
        assert np.abs(difference).mean() < 10
    # Shards of one preparation are not mixed with those of another.
    assert shards(folder, tmp_path / "exact", "--size", "32", "--fast") == 2


@pytest.mark.parametrize("options", [("--crops", "0"), ("--crops", "2"), ("--crop", "evaluation")])
def test_invalid_crops(folder, tmp_path, capsys, options):
    if options[0] == "--crop":
        options = (*options, "--crops", "2")
    assert shards(folder, tmp_path / "out", "--size", "8", *options) == 2
    reason = "'0' is not a whole number" if "0" in options else "more than 1 only for random crops"
    assert f"--crops: {reason}" in capsys.readouterr().err
