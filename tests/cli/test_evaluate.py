"""`megavis evaluate` with a small feature network."""

import json
import shlex
from pathlib import Path

import foolbox
import numpy as np
import pytest
import torch
from inception_weights import random_images
from PIL import Image
from small_network import Small
from small_vqgan import write_untrained_run
from tiny import tiny

from megavis.cli import main
from megavis.commands import evaluate
from megavis.data.format.files import sha256_of_file
from megavis.evaluation.images.feature_networks import EfficientNetFeatures
from megavis.evaluation.images.image_files import open_images
from megavis.evaluation.images.results import NetworkName
from megavis.evaluation.images.set_metrics import precision_and_recall
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.training.provenance import read_commands

pytestmark = pytest.mark.once

CPU, NAME = ["--device", "cpu"], "efficientnet-lite0"


@pytest.fixture(autouse=True)
def network(monkeypatch):
    network = Small()
    monkeypatch.setattr(evaluate, "open_network", lambda *_: network)
    return network


def test_evaluate_samples(network, shards, tmp_path, capsys):
    run, reference = tmp_path / "run", tmp_path / "reference.npz"
    npz = run / "samples" / "images.npz"
    npz.parent.mkdir(parents=True)
    config = tiny(
        "{name: gvp, patch_size: 4, num_groups: 3}", validates=True, training={"validate_every": 1}
    )
    (run / "config.yaml").write_text(config + "finetune: {num_classes: 3}\n")
    words = ["samples", str(run), "--reference", str(reference), *CPU]
    assert main(["evaluate", *words]) == 2
    assert f"`megavis ensemble {run} --images FOLDER` measures" in capsys.readouterr().err
    (run / "config.yaml").write_text(config)
    assert main(["evaluate", *words]) == 2
    assert f"generate some: megavis sample {run} --num-images 50000" in capsys.readouterr().err
    images = random_images(10, 8)
    np.savez(npz, arr_0=images.numpy())
    made = ["--num-images", "30", "--out", str(reference), *CPU]
    assert main(["evaluate", "statistics", str(shards / "validation"), *made]) == 0
    capsys.readouterr()
    assert main(["evaluate", *words]) == 0
    printed = capsys.readouterr()
    assert "Fréchet distance (features of small), not FID: " in printed.out
    for part in (f"N 10 of {npz}", f"{sha256_of_file(reference)[:8]} (N 30)", "resize none"):
        assert part in printed.out
    assert "published results use 50,000 samples, these are 10: compare" in printed.err
    assert [line["command"] for line in read_commands(run)] == [
        shlex.join(["megavis", "evaluate", *words])
    ]
    record = json.loads((run / "evaluation" / "samples.json").read_text())
    assert not {"fid", "sfid", "inception_score"} & record.keys()
    features = network(images).features
    held_out = torch.from_numpy(np.load(reference)["features"])
    distances = [
        distance(features[:, part], held_out[:, part]) for part in (slice(0, 9), slice(3, 9))
    ]
    assert record["frechet_distance"] == pytest.approx(distances[0], rel=1e-4)
    assert record["spatial_frechet_distance"] == pytest.approx(distances[1], rel=1e-4)
    shares = precision_and_recall(features, held_out)
    assert (record["precision"], record["recall"]) == pytest.approx(shares)


@pytest.mark.parametrize(("suffixes", "noted"), [(["jpg", "png"], True), (["png", "png"], False)])
def test_generated_images_that_are_stored_with_loss_are_noted(
    network, tmp_path, capsys, suffixes, noted
):
    for number, image in enumerate(random_images(10, 8).numpy()):
        path = tmp_path / "made" / f"{number}.{suffixes[number % 2]}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    reference = tmp_path / "reference.npz"
    np.savez(reference, arr_0=random_images(12, 8, seed=1).numpy())
    words = ["samples", str(tmp_path / "made"), "--reference", str(reference), *CPU]
    assert main(["evaluate", *words]) == 0
    note = "note: 5 of 10 samples are JPEG files, whose losses count as differences"
    assert (note in capsys.readouterr().err) == noted


def distance(first, second):
    """Compute equation 6 of Heusel et al. without covariance matrices.

    For centred row vectors A and B, Tr (AᵀA BᵀB)^½ is the sum of the singular values of ABᵀ.
    """
    means = [part.double().mean(0) for part in (first, second)]
    a, b = (
        (part.double() - mean) / (len(part) - 1) ** 0.5
        for part, mean in zip((first, second), means, strict=True)
    )
    overlap = torch.linalg.svdvals(a @ b.t()).sum()
    spread = a.square().sum() + b.square().sum()
    return ((means[0] - means[1]).square().sum() + spread - 2 * overlap).item()


def test_adm_reference_files(network, tmp_path, capsys):
    """Distances use the statistics in the file, precision and recall its images."""
    network.about = NetworkName("small", "ab" * 32, "none", is_published=True)
    np.savez(tmp_path / "samples.npz", random_images(20, 8, seed=1).numpy())
    statistics = {"mu": np.full(9, 0.5), "sigma": 0.1 * np.eye(9)}
    spatial = {"mu_s": np.full(6, 0.5), "sigma_s": 0.1 * np.eye(6)}
    images = random_images(15, 8, seed=2)
    np.savez(tmp_path / "adm.npz", arr_0=images.numpy(), **statistics, **spatial)
    words = ["samples", str(tmp_path / "samples.npz"), *CPU, "--reference"]
    assert main(["evaluate", *words, str(tmp_path / "adm.npz")]) == 0
    printed = capsys.readouterr().out
    score = "inception score (mean of 10 random splits) "
    for part in ("FID: ", "sFID ", score, "of splits in order ", "precision "):
        assert part in printed
    assert "of another tool, N unknown" in printed
    record = json.loads((tmp_path / "samples.npz.evaluation.json").read_text())
    ours = network(random_images(20, 8, seed=1)).features
    expected = precision_and_recall(ours, network(images).features)
    assert (record["precision"], record["recall"]) == pytest.approx(expected)
    np.savez(tmp_path / "theirs.npz", **statistics)  # the format of pytorch-fid
    assert main(["evaluate", *words, str(tmp_path / "theirs.npz")]) == 0
    assert "precision" not in capsys.readouterr().out
    np.savez(tmp_path / "theirs.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    assert main(["evaluate", *words, str(tmp_path / "theirs.npz")]) == 2
    assert "has 2048 features, small abababab has 9" in capsys.readouterr().err


def test_efficientnet_classifies_imagenet_images():
    """The preprocessing matches the network: photographs of ImageNet get their class."""
    files = sorted((Path(foolbox.__file__).parent / "data").glob("imagenet_*.jpg"))[:6]
    # `imagenet_03_366.jpg`: the last number is the class.
    network = EfficientNetFeatures(torch.device("cpu"))
    named = [
        network(torch.from_numpy(np.array(Image.open(file).convert("RGB")))[None]).logits.argmax()
        for file in files
    ]
    right = sum(
        int(file.stem.split("_")[2]) == int(n) for file, n in zip(files, named, strict=True)
    )
    assert right >= 5
    assert network.about.sha256.startswith("57934424")
    assert not network.about.is_published


def test_evaluate_reconstruction(network, image_shards, tmp_path, capsys):
    run = write_untrained_run(tmp_path)
    config = run / "config.yaml"
    # The run's checkpoint has no discriminator.
    config.write_text(
        config.read_text().replace("adversarial_weight: 0.1", "adversarial_weight: 0")
    )
    words = ["--images", str(image_shards / "train"), "--num-images", "70", *CPU]
    assert main(["evaluate", "reconstruction", str(run), *words, "--network", NAME]) == 0
    printed = capsys.readouterr().out
    assert f"N 70 of {image_shards}/train, step 0" in printed
    assert f"train through {run}, network small" in printed
    record = json.loads((run / "evaluation" / "reconstruction.json").read_text())
    tokenizer = open_tokenizer(run)
    images = torch.from_numpy(open_images(image_shards / "train").read(np.arange(70)))
    made = tokenizer.decode(tokenizer.encode(images))
    errors = (made.double() - images.double()).square().mean((1, 2, 3))
    assert record["psnr"] == pytest.approx((10 * torch.log10(255**2 / errors)).mean().item())
    assert 0 < record["ssim"] < 1
    expected = distance(network(made).features, network(images).features)
    assert record["distance"]["frechet_distance"] == pytest.approx(expected, rel=1e-4)
    assert not {"precision", "recall", "fid"} & record["distance"].keys()
