"""Commands on a run share its cached features."""

import json

import numpy as np
import pytest

import megavis
from megavis.cli import main
from megavis.data.loading.dataset import ShardDataset
from megavis.parallel.context import close_context

pytestmark = pytest.mark.once


def test_features_are_cached_across_commands(shard_folders, train_small, tmp_path, capsys):
    run = train_small(tmp_path, "objective.mode=bert", "checkpoint.every=1")
    words = [str(run), "--device", "cpu"]
    probing = ["probe", *words, "--untrained-networks", "1", "--masks", "2"]
    assert main(probing) == 0
    first = json.loads((run / "evaluation" / "probe.json").read_text())
    # Two networks, with one mask of the training images and two of the validation images.
    assert "features: 6 sets computed" in capsys.readouterr().out
    assert main(probing) == 0
    assert "features: 0 sets computed in 0.0 s, 6 read" in capsys.readouterr().out
    assert json.loads((run / "evaluation" / "probe.json").read_text()) == first
    assert main(["figure", "neighbors", *words, "--train-images", "100"]) == 0
    assert "features: 0 sets computed in 0.0 s, 4 read" in capsys.readouterr().out
    assert main([*probing, "--step", "1"]) == 0
    assert "features: 3 sets computed" in capsys.readouterr().out
    assert main([*probing, "--precision", "bf16"]) == 0
    rough = json.loads((run / "evaluation" / "probe.json").read_text())
    assert "features: 6 sets computed" in capsys.readouterr().out
    assert rough["pixels"] == first["pixels"]
    assert rough["best_layer"]["selection_loss"] == pytest.approx(
        first["best_layer"]["selection_loss"], rel=0.1
    )

    assert main(["features", str(run)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 16
    assert any(
        "bfloat16" in line and ", view 1: 36 images, 2 layers of 16" in line for line in listed
    )
    assert main(["features", str(run), "--clear"]) == 0
    assert not list((run / "evaluation" / "features").iterdir())
    assert main(["likelihood", *words]) == 2
    assert "igpt, as configured in this run, is not a likelihood" in capsys.readouterr().err
    assert main(["probe", *words, "--train", f"{shard_folders}/validation"]) == 2
    assert (
        "its shard-000000.tar has the SHA-256 of the other's shard-000000.tar"
        in capsys.readouterr().err
    )


def test_likelihood_matches_a_loop(shard_folders, train_small, tmp_path, capsys):
    folder = train_small(tmp_path)
    words = ["likelihood", str(folder), "--device", "cpu"]
    assert main([*words, "--num-images", "20"]) == 0
    found = json.loads((folder / "evaluation" / "likelihood.json").read_text())

    try:
        run = megavis.load(str(folder), device="cpu")
        ids = ShardDataset(shard_folders / "validation").read(np.arange(20))[0].astype(np.int64)
        probabilities = run.outputs(ids).double().softmax(-1).numpy()
    finally:
        close_context()
    bits = [
        -np.log2(probabilities[image, place, ids[image, place]])
        for image in range(20)
        for place in range(16)
    ]
    assert found["bits_per_dimension"] == pytest.approx(np.mean(bits), rel=1e-5)
    assert found["nats_per_image"] == pytest.approx(16 * np.log(2) * np.mean(bits), rel=1e-5)
    assert (found["step"], found["num_images"], found["dimensions_per_image"]) == (2, 20, 16)
    assert "colour of a vocabulary of 32; 16 per image" in capsys.readouterr().out

    assert main([*words, "--images", f"{shard_folders}/train"]) == 2
    assert "cannot evaluate what was trained on" in capsys.readouterr().err
