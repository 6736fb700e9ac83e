"""`megavis sample` for GIVT, with the golden models."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_child
from latent_shards import write_latent_shards
from PIL import Image

from megavis.cli import main
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.network_tokenizer import open_tokenizer

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parents[1] / "data" / "givt"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a VAE and of three models of its latents."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["import", "givt-vae", str(GOLDEN / "vae.npz"), str(folder / "vae")]) == 0
    for name in ("givt_causal", "givt_maskgit", "givt_full_covariance"):
        options = ["--num-classes", "10", "--tokenizer", str(folder / "vae")]
        source, target = str(GOLDEN / f"{name}.npz"), str(folder / name)
        assert main(["import", "givt", source, target, *options]) == 0
    return folder


def sample(runs, name, *words):
    return main(["sample", str(runs / name), "--device", "cpu", *words])


@pytest.mark.parametrize(
    ("name", "words", "tiles"),
    [
        ("givt_causal", ["--classes", "0,3", "--per-class", "3", "--guidance", "0.4"], (2, 3)),
        ("givt_causal", ["--classes", "0", "--then-classes", "5", "--per-class", "2"], (1, 2)),
        # As in figure 19: a row for each class of the upper halves.
        (
            "givt_causal",
            ["--classes", "0,0,0,3,3,3", "--then-classes", "0,1,2,3,4,5", "--per-class", "1"],
            (2, 3),
        ),
        ("givt_causal", ["--num-images", "4", "--beams", "2", "--fans", "2"], (1, 4)),
        ("givt_maskgit", ["--classes", "1,2", "--per-class", "1", "--guidance", "0.1"], (2, 1)),
        ("givt_maskgit", ["--classes", "7", "--rounds", "3", "--show-rounds"], (8, 4)),
    ],
)
def test_sample_grids(runs, tmp_path, capsys, name, words, tiles):
    out = tmp_path / "grid.png"
    assert sample(runs, name, *words, "--out", str(out)) == 0
    pixels = np.asarray(Image.open(out))
    # Images of 16² pixels, enlarged eight times, with lines of two pixels between them.
    assert pixels.shape == (tiles[0] * 130 + 2, tiles[1] * 130 + 2, 3)
    assert ("of the proposals accepted" in capsys.readouterr().out) == ("--guidance" in words)


def test_shipped_composition_trains_and_samples(runs, image_shards, tmp_path):
    """Rows that alternate places and latents, which a modulated MLP denoises: YAML alone."""
    config = str(GOLDEN.parents[2] / "yaml_configs/compose/instructed_latents.yaml")
    words = [f"objective.reads.tokenizer={runs}/vae", "objective.reads.channels=8"]
    words += ["objective.reads.patch_size=4", "model.num_layers=1", f"output={tmp_path}"]
    words += [f"data.{part}={image_shards}/{part}" for part in ("train", "validation")]
    words += ["data.image_size=16", "training.steps=2", "schedule.warmup_steps=0"]
    words += ["training.batch_size=4", "training.validate_every=2", "training.validation_images=4"]
    assert main(["train", config, *words, "--device", "cpu"]) == 0
    run, grid = tmp_path / "compose_instructed_latents", tmp_path / "grid.png"
    words = ["--classes", "1,2", "--per-class", "3", "--rounds", "5", "--sampling-steps", "3"]
    words += ["--guidance", "1", "--out", str(grid), "--device", "cpu"]
    assert main(["sample", str(run), *words]) == 0
    assert np.asarray(Image.open(grid)).shape == (262, 392, 3)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [each["validation_loss"] for each in records if "validation_loss" in each]
    assert losses
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "not even one image fits into the memory of cpu"),
        (["--batch-size", "2"], "a batch of 2 does not fit into the memory of cpu; give a smaller"),
        (["--batch-size", "0"], "'0' is not a whole number of 1 or more"),
    ],
)
def test_batches_that_do_not_fit(runs, monkeypatch, capsys, words, message):
    def without_room(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Sampler, "tokens", without_room)
    assert sample(runs, "givt_causal", "--num-images", "3", *words) == 2
    assert message in capsys.readouterr().err


def test_npz_of_other_settings_is_refused(runs, tmp_path, capsys):
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    words = ["--num-images", "20", "--batch-size", "8", "--npz"]
    assert sample(runs, "givt_causal", *words, str(whole)) == 0
    parts = tmp_path / "broken.npz.parts"
    assert sample(runs, "givt_causal", *words, str(broken)) == 0
    with np.load(whole) as archive:
        images = archive["arr_0"]
    assert images.shape == (20, 16, 16, 3)
    assert images.dtype == np.uint8
    # Parts of an interrupted command with other settings.
    settings = {"step": 0, "seed": 0}
    parts.mkdir()
    broken.unlink()
    (parts / "settings.json").write_text(str(settings))
    assert sample(runs, "givt_causal", *words, str(broken)) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [("givt_full_covariance", []), ("givt_causal", ["--precision", "bf16"])],
    ids=["run", "precision"],
)
def test_npz_of_another_network_is_refused(runs, tmp_path, capsys, monkeypatch, name, words):
    common = ["--num-images", "2", "--batch-size", "1", "--npz", str(tmp_path / "images.npz")]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("megavis.sampling.pictures._join", interrupt)
        assert sample(runs, "givt_causal", *common) == 130
    assert sample(runs, name, *common, *words) == 2
    assert "other settings" in capsys.readouterr().err
    assert sample(runs, "givt_causal", *common) == 0


def print_moments(runs):
    """Print the moments of samples and of two shard folders, both written in the working one."""
    vae = open_tokenizer(str(runs / "vae"))
    options = {"shape": vae.latent_shape(16), "identity": vae.identity()}
    for number, folder in enumerate(("shards/train", "held_out")):
        write_latent_shards(Path(folder), num_classes=10, num_images=30, seed=number, **options)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        words = ["--moments", "--num-images", "20", "--images", "held_out"]
        assert sample(runs, "givt_causal", *words) == 0
        written = Path("elsewhere/moments.json")
        assert sample(runs, "givt_causal", *words, "--out", str(written)) == 0
    return printed.getvalue()


def test_moments(runs, tmp_path):
    # The training data of an imported run is a relative path.
    lines = in_child(print_moments, runs, folder=tmp_path).splitlines()
    _, drawn, trained, path = lines[:4]
    result = json.loads((tmp_path / path).read_text())
    assert lines[-1] == "elsewhere/moments.json"
    assert (tmp_path / lines[-1]).read_text() == (tmp_path / path).read_text()
    assert result["num_drawn"] == result["num_held_out"] == 20
    # Both folders have the same distribution; the golden model was not trained on it.
    for moment, difference in result["training_difference"].items():
        assert difference < 0.5
        assert f"{moment} {difference:.3f}" in trained
        assert f"{moment} {result['largest_difference'][moment]:.3f}" in drawn


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("givt_full_covariance", ["--guidance", "0.4"], "--guidance does not apply"),
        ("givt_causal", ["--top-k", "4"], "--top-k does not apply to this run of givt"),
        ("givt_causal", ["--classes", "11"], "--classes: labels must be in 0..9"),
        ("givt_causal", ["--classes", "1", "--then-classes", "1,2"], "as many classes"),
        (
            "givt_maskgit",
            ["--beams", "2", "--fans", "2"],
            "--beams, --fans do not apply to this run of givt_maskgit, which takes --temperature",
        ),
        ("givt_causal", ["--rounds", "3"], "--rounds does not apply to this run of givt, which"),
        ("givt_causal", ["--per-class", "3"], "--per-class does not apply without --classes"),
        ("givt_causal", ["--images", "shards"], "--images does not apply without --prefix"),
        ("givt_causal", ["--completions", "2"], "--completions does not apply without --prefix"),
        ("givt_causal", ["--moments", "--out", "a.png"], "must end in .json"),
        ("givt_causal", ["--moments", "--classes", "1"], "--classes does not apply to --moments"),
        ("givt_causal", ["--npz", "x.npz", "--classes", "1"], "--classes does not apply to --npz"),
        ("givt_causal", ["--classes", "1", "--num-images", "4"], "--num-images does not apply to"),
        ("givt_causal", ["--classes", "1", "--show-rounds"], "generate many tokens at once"),
        ("givt_maskgit", ["--classes", "1", "--then-classes", "2"], "none can be given"),
        ("givt_maskgit", ["--rounds", "0"], "1 or more"),
    ],
)
def test_inapplicable_options(runs, capsys, name, words, message):
    assert sample(runs, name, *words) == 2
    assert message in capsys.readouterr().err
