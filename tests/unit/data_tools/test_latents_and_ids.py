"""`latents` and `ids`: images encoded by tokenizers, read back as in training."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import webdataset
from image_files import bad_files, encoded, real_jpegs, tree
from PIL import Image
from small_codebook import SmallCodebook
from vae_config import write_config

from data_tools.__main__ import main
from data_tools.resize import resize_and_crop
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.save import write_weights
from megavis.cli import main as megavis
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.notebook import Run
from megavis.tokenizers import network_tokenizer
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.tokenizers.vae import VAE

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def vae_run(tmp_path_factory, image_shards):
    """The run folder of a small VAE."""
    folder = tmp_path_factory.mktemp("vae")
    options = ["objective.adversarial_weight=0", "training.steps=30", "--device", "cpu"]
    assert megavis(["train", str(write_config(folder, image_shards)), *options]) == 0
    return folder / "small"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Eleven images in two classes, and three bad files."""
    root = tmp_path_factory.mktemp("pictures")
    for number, path in enumerate(real_jpegs()[:11]):
        folder = root / ("cats", "dogs")[number % 2]
        folder.mkdir(exist_ok=True)
        small = Image.open(path).convert("RGB").resize((60, 40 + number))
        (folder / f"{number}.png").write_bytes(encoded(small, "PNG"))
    for name in ("zero.jpg", "half.png", "thin.png"):
        (root / "dogs" / name).write_bytes(bad_files()[name][0])
    return root


def latents(images, run, out, *options):
    words = ["latents", str(images), "--tokenizer", str(run), "--out", str(out)]
    return main([*words, "--size", "16", "--samples-per-shard", "8", "--batch-size", "4", *options])


def squares(out, images, size=16):
    """Return the images of a shard folder's samples, in its order: uint8 `[n, s, s, 3]`."""
    names = []
    for path in sorted(out.glob("*.index.json")):
        names += json.loads(path.read_text())["sources"]
    pictures = [np.asarray(Image.open(images / name).convert("RGB")) for name in names]
    return np.stack([resize_and_crop(picture, size=size, library="torch") for picture in pictures])


def members(out, suffix):
    """Return the members with a suffix as webdataset reads them, in order."""
    tars = [str(path) for path in sorted(out.glob("*.tar"))]
    return [sample[suffix] for sample in webdataset.WebDataset(tars, shardshuffle=False)]


def test_latents_match_the_run(vae_run, context, images, tmp_path):
    """Compare with the run's forward pass, which does not use the tokenizer interface."""
    out = tmp_path / "out"
    assert latents(images, vae_run, out) == 0
    pixels = squares(out, images)
    stored = ShardDataset(out).read(np.arange(11))[0]
    assert len(pixels) == len(stored) == 11
    for content, first in zip(members(out, "lat"), stored, strict=True):
        both = np.frombuffer(content, "<f2").reshape(2, *first.shape)  # second: flipped image
        assert np.array_equal(both[0], first)
    run = Run.open(vae_run, device="cpu")
    for flip, shown in ((False, pixels), (True, pixels[:, :, ::-1].copy())):
        mean, log_variance = run.outputs(torch.from_numpy(shown)).detach().chunk(2, dim=1)
        expected = torch.stack([mean, (0.5 * log_variance).exp()], dim=1).numpy()
        dataset = ShardDataset(out, Transform(image_size=16, flip=flip))
        # Choose positions at which the transform flips, or does not.
        positions = np.arange(400)
        chosen = positions[Transform(16, flip=flip).flips(positions) == flip][:11]
        read, labels = dataset.read(np.arange(11), positions=chosen)
        assert read.dtype == np.float16
        np.testing.assert_allclose(read, expected, rtol=1e-3, atol=1e-5)
        assert set(labels.tolist()) == {0, 1}


def test_manifest_of_latents(vae_run, images, tmp_path):
    out = tmp_path / "out"
    assert latents(images, vae_run, out, "--no-flip") == 0
    manifest = Manifest.read(out)
    assert (manifest.kind, manifest.latent_shape, manifest.flipped) == ("latents", (4, 4, 4), False)
    assert manifest.tokenizer_name == "vae"
    assert manifest.identity == open_tokenizer(vae_run).identity()
    assert manifest.skipped == {"aspect ratio above 64": 1, "truncated": 1, "zero bytes": 1}
    assert main(["verify", str(out)]) == 0


def test_stored_latents_are_decoded(vae_run, images, tmp_path):
    """Decoded means are closer to the images than those of an untrained network."""
    out = tmp_path / "out"
    assert latents(images, vae_run, out) == 0
    pixels = squares(out, images).astype(int)
    means = torch.from_numpy(ShardDataset(out).read(np.arange(11))[0][:, 0])
    decoded = open_tokenizer(vae_run).decode(means).numpy()
    fresh = VAE(open_tokenizer(vae_run).shape).decode(means).numpy()
    assert np.abs(decoded - pixels).mean() < 0.7 * np.abs(fresh - pixels).mean()
    sheet = tmp_path / "sheet.png"
    assert main(["inspect", str(out), "--out", str(sheet), "--count", "4", "--scale", "1"]) == 2
    show = ["inspect", str(out), "--out", str(sheet), "--count", "1", "--scale", "1"]
    assert main([*show, "--tokenizer", str(vae_run)]) == 0
    assert np.array_equal(np.asarray(Image.open(sheet))[2:18, 2:18], decoded[0])


def test_workers_and_reruns_are_deterministic(vae_run, images, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert latents(images, vae_run, one) == 0
    assert latents(images, vae_run, two, "--workers", "1") == 0
    assert tree(one) == tree(two)
    (two / "shard-000001.tar").unlink()
    (two / "manifest.json").unlink()
    assert latents(images, vae_run, two) == 0
    assert tree(one) == tree(two)


def test_random_crops_are_separate_samples(vae_run, images, tmp_path):
    # The images are 3:2: no square of them has 80 % of the area.
    options = ["--crop", "inception", "--crops", "2", "--aspect", "0.75", "1.33"]
    assert latents(images, vae_run, tmp_path / "out", *options) == 0
    dataset = ShardDataset(tmp_path / "out")
    assert len(dataset) == 22
    first, second = dataset.read(np.arange(2))[0]
    assert dataset.labels[0] == dataset.labels[1]
    assert not np.array_equal(first, second)
    assert "2 times: random part of 80% to 100%" in dataset.manifest.preparation.crop


def test_non_finite_latents_are_skipped(vae_run, images, tmp_path, monkeypatch):
    encode = VAE.encode

    def overflowing(self, pixels):
        latents = encode(self, pixels)
        latents[0, 0, 0, 0, 0] = 1e5  # infinite in float16
        return latents

    monkeypatch.setattr(VAE, "encode", overflowing)
    assert latents(images, vae_run, tmp_path / "out") == 0
    manifest = Manifest.read(tmp_path / "out")
    # The first image of each of the four batches.
    assert manifest.skipped["latents not finite in float16"] == 4
    assert manifest.num_samples == 7


def test_tokenizer_is_checked(vae_run, images, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    assert latents(images, vae_run, out) == 0
    other.mkdir()
    shutil.copy(vae_run / "config.yaml", other)
    weights = {name: 2 * value for name, value in read_weights(latest_checkpoint(vae_run)).items()}
    write_weights(other, weights, seed=0, tokenizer=None)
    assert latents(images, other, out) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main(["inspect", str(out), "--out", "a.png", "--tokenizer", str(other)]) == 2
    assert "is not the tokenizer that made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "18"], "multiple of 4, not 18"),
        (["--batch-size", "0"], "--batch-size: '0' is not a whole number of 1 or more"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--crops", "2"], "more than 1 only for random crops"),
        (["--tokenizer", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_errors_are_one_line(vae_run, images, tmp_path, capsys, options, message):
    assert latents(images, vae_run, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def codebook_run(images, tmp_path, monkeypatch):
    monkeypatch.setitem(
        network_tokenizer.TOKENIZERS, "small_codebook", "small_codebook:SmallCodebook"
    )
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in images.rglob("?.png")]
    small = np.stack([resize_and_crop(picture, size=16, library="torch") for picture in pictures])
    return SmallCodebook(300).fit(torch.from_numpy(small)).save_run(tmp_path / "codebook")


def test_ids(codebook_run, vae_run, images, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["ids", str(images), "--out", str(out), "--size", "16", "--batch-size", "4"]
    assert main([*words, "--tokenizer", str(codebook_run), "--flip"]) == 0
    dataset, tokenizer = ShardDataset(out), open_tokenizer(codebook_run)
    pixels = squares(out, images)
    assert len(dataset) == len(pixels) == 22
    pixels[1::2] = pixels[1::2, :, ::-1]
    expected = tokenizer.encode(torch.from_numpy(pixels))
    assert np.array_equal(dataset.read(np.arange(22))[0], expected.numpy())
    plainly = [np.frombuffer(content, "<u2") for content in members(out, "ids")]
    assert np.array_equal(plainly, expected.numpy())
    assert dataset.manifest.identity == tokenizer.identity()
    assert (dataset.manifest.num_tokens, dataset.manifest.vocabulary_size) == (16, 300)
    sheet = tmp_path / "sheet.png"
    show = ["inspect", str(out), "--out", str(sheet), "--tokenizer", str(codebook_run)]
    assert main([*show, "--count", "1", "--scale", "1"]) == 0
    decoded = tokenizer.decode(expected[:1]).numpy()[0]
    assert np.array_equal(np.asarray(Image.open(sheet))[2:18, 2:18], decoded)
    assert main([*words, "--tokenizer", str(vae_run)]) == 2
    assert "use the verb latents" in capsys.readouterr().err
    assert latents(images, codebook_run, tmp_path / "other") == 2
    assert "use the verb ids" in capsys.readouterr().err
