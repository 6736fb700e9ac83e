"""`--resize`: the library that resizes, named in the manifest, in every verb that resizes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from image_files import encoded, real_jpegs
from PIL import Image

from data_tools.__main__ import main
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

BICUBIC = Image.Resampling.BICUBIC


@pytest.fixture
def images(tmp_path):
    """Eight JPEGs and a PNG, whose pixels Pillow returns as an array that cannot be written."""
    root = tmp_path / "images" / "a"
    root.mkdir(parents=True)
    for number, path in enumerate(real_jpegs()[:8]):
        picture = Image.open(path).convert("RGB").resize((200, 150))
        (root / f"{number}.jpg").write_bytes(encoded(picture, "JPEG", quality=95))
    (root / "8.png").write_bytes(encoded(picture, "PNG"))
    return root.parent


@pytest.fixture
def palette(tmp_path):
    path = tmp_path / "palette.npy"
    Palette(np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)).save(path)
    return path


def verbs(images, palette):
    """Return the words of each verb that writes shards of resized images, without a network."""
    return {
        "palette": ["palette", "shards", images, "--palette", palette, "--size", "24"],
        "jpeg": ["jpeg", images, "--size", "24", "--lossless"],
        "pairs": ["pairs", images, images, "--size", "24", "--target-resize", "bicubic"],
    }


def run(*words):
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize("verb", ["palette", "jpeg", "pairs"])
def test_the_manifest_names_the_library(images, palette, tmp_path, verb):
    words = verbs(images, palette)[verb]
    run(*words, "--out", tmp_path / "torch")
    run(*words, "--out", tmp_path / "pillow", "--resize", "pillow")
    ours, pillows = (Manifest.read(tmp_path / name).preparation for name in ("torch", "pillow"))
    assert ours.resize.startswith("torch bicubic (antialiased)")
    assert pillows.resize.startswith("Pillow bicubic (antialiased)")
    assert set(ours.decoders) == {"pillow", "simplejpeg", "torch"}
    assert set(pillows.decoders) == {"pillow", "simplejpeg"}
    # Another resize is another data set.
    again = [str(word) for word in (*words, "--out", tmp_path / "torch", "--resize", "pillow")]
    assert main(again) == 2


def test_pixels_are_pillows_up_to_rounding(images, tmp_path):
    words = ["jpeg", images, "--size", "24", "--lossless"]
    run(*words, "--out", tmp_path / "torch")
    run(*words, "--out", tmp_path / "pillow", "--resize", "pillow")
    pixels = [ShardDataset(tmp_path / name).read(np.arange(9))[0] for name in ("torch", "pillow")]
    dataset = ShardDataset(tmp_path / "pillow")
    names = [dataset.name_of(number).split(":")[1] for number in range(9)]
    reader = ShardReader(tmp_path / "pillow" / "shard-000000.tar")
    for name, found in zip(names, pixels[1], strict=True):
        source = reader.index.sources[reader.index.keys.index(name)]
        resized = Image.open(images / source).convert("RGB").resize((32, 24), BICUBIC)
        assert np.array_equal(np.asarray(resized)[:, 4:28], found)
    difference = np.abs(pixels[0].astype(int) - pixels[1])
    assert difference.max() == 1
    assert (difference > 0).mean() < 0.02


def test_fitting_a_palette_takes_the_option(images, tmp_path, capsys):
    for library in ("torch", "pillow"):
        out = tmp_path / f"{library}.npy"
        options = ["--size", "16", "--num-colors", "8", "--resize", library]
        run("palette", "fit", images, "--out", out, *options)
    one, two = (Palette.load(tmp_path / f"{name}.npy").centers for name in ("torch", "pillow"))
    assert np.abs(one - two).max() < 0.1


def test_images_of_the_right_size_are_kept(images, palette, tmp_path):
    """The demos' images: the same bytes with either library."""
    small = tmp_path / "small"
    run("jpeg", images, "--size", "24", "--lossless", "--out", tmp_path / "first")
    small.mkdir()
    for number, pixels in enumerate(ShardDataset(tmp_path / "first").read(np.arange(9))[0]):
        Image.fromarray(pixels).save(small / f"{number}.png")
    for name, words in verbs(small, palette).items():
        run(*words, "--out", tmp_path / f"{name}_torch")
        run(*words, "--out", tmp_path / f"{name}_pillow", "--resize", "pillow")
        tars = [tmp_path / f"{name}_{one}" / "shard-000000.tar" for one in ("torch", "pillow")]
        assert tars[0].read_bytes() == tars[1].read_bytes()


def test_torch_is_imported_only_to_write(images, tmp_path):
    """Help starts without it; webdataset, which writes shards, imports it."""
    program = f"""if True:
        import contextlib, io, sys
        from data_tools.__main__ import main
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(SystemExit):
                main(["palette", "shards", "--help"])
            before = "torch" in sys.modules
            words = ["--out", {str(tmp_path / "small")!r}, "--size", "8"]
            assert main(["jpeg", {str(images)!r}, *words]) == 0
        print(before, "torch" in sys.modules)
    """
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert answer.stdout.split() == ["False", "True"]
    assert not answer.stderr


def test_other_libraries_are_refused(images, tmp_path, capsys):
    words = ["jpeg", str(images), "--size", "8", "--out", str(tmp_path / "out")]
    assert main([*words, "--resize", "opencv"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_jpeg_without_a_size_resizes_nothing(images, tmp_path):
    run("jpeg", images, "--out", tmp_path / "out")
    assert Manifest.read(tmp_path / "out").preparation.resize == "none"
