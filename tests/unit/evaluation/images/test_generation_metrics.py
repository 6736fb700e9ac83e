"""Fréchet distance, class score, precision and recall against torch-fidelity and torchmetrics.

torch-fidelity needs torchvision, so its output is stored in tests/data/inception.
"""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from inception_weights import random_features
from PIL import Image
from torchmetrics.image.fid import FrechetInceptionDistance

from megavis.commands.evaluate import collect_features
from megavis.evaluation.images import set_metrics
from megavis.evaluation.images.feature_networks import Activations
from megavis.evaluation.images.image_files import open_images
from megavis.evaluation.images.results import NetworkName
from megavis.evaluation.images.set_metrics import (
    RunningClassScore,
    RunningGaussian,
    frechet_distance,
    precision_and_recall,
)

pytestmark = pytest.mark.once

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "inception" / "golden.npz")


def gaussian(features, batch_size=37):
    running = RunningGaussian()
    for batch in features.split(batch_size):
        running.add(batch)
    return running.result()


class Identity(torch.nn.Module):
    """A feature network for torchmetrics that returns its input."""

    def __init__(self, num_features):
        super().__init__()
        self.num_features = num_features

    def forward(self, features):
        return features


def distance_of_torchmetrics(first, second):
    metric = FrechetInceptionDistance(feature=Identity(first.shape[1])).set_dtype(torch.float64)
    metric.update(first.double(), real=True)
    metric.update(second.double(), real=False)
    return metric.compute().item()


def test_batched_mean_and_covariance_match_numpy():
    # A large offset, where naive sums of squares would cancel.
    features = random_features()[0] + 1e4
    found, whole = gaussian(features), features.double().numpy()
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(whole, rowvar=False), atol=1e-9)


def test_frechet_distance_matches_torch_fidelity_and_torchmetrics():
    first, second, _ = random_features()
    found = frechet_distance(gaussian(first), gaussian(second))
    assert found == pytest.approx(float(GOLDEN["frechet_inception_distance"]), rel=1e-6)
    assert found == pytest.approx(distance_of_torchmetrics(first, second), rel=1e-6)


def test_frechet_distance_with_singular_covariances():
    """Fewer images than features, and two orthogonal lines."""
    random = np.random.RandomState(0)
    first, second = (
        torch.from_numpy(random.standard_normal((n, 64)).astype(np.float32)) for n in (20, 30)
    )
    found = frechet_distance(gaussian(first), gaussian(second))
    assert found == pytest.approx(distance_of_torchmetrics(first, second), rel=1e-3)
    assert frechet_distance(gaussian(first), gaussian(first)) == pytest.approx(0.0, abs=1e-10)
    lines = torch.zeros(2, 5, 64)
    lines[0, :, 0], lines[1, :, 1] = torch.arange(5.0), torch.arange(5.0) * 2
    # Means (2, 0) and (0, 4), variances 2.5 and 10.
    assert frechet_distance(*map(gaussian, lines)) == pytest.approx(20.0 + 12.5, rel=1e-12)


@pytest.mark.parametrize("batch_size", [23, 64])
def test_inception_score_matches_torch_fidelity(batch_size):
    logits = random_features()[2]
    score = RunningClassScore(len(logits), in_order=True)
    for batch in logits.split(batch_size):
        score.add(batch)
    golden = (float(GOLDEN[f"inception_score_{name}"]) for name in ("mean", "std"))
    assert score.result() == pytest.approx(tuple(golden), rel=1e-6)


def test_inception_score_of_sorted_images(tmp_path):
    """A folder for each class, as other tools write them: its splits must not be of few classes."""
    network = FourClasses()
    for number in range(400):
        folder = tmp_path / f"class_{number // 100}"
        folder.mkdir(exist_ok=True)
        pixels = np.full((4, 4, 3), number // 100, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    images = open_images(tmp_path)
    summary = collect_features(images, network, Namespace(batch_size=64), num_kept=0)
    score, _ = summary.class_score
    # Four classes that are certain and equally likely have exp KL = 4; a split of one has 1.
    assert score == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("sort", [False, True])
def test_inception_score_does_not_depend_on_the_order_of_an_array(sort, tmp_path):
    """Neither classes in turn, as `megavis sample` writes them, nor one after another change it."""
    classes = np.arange(400) % 4
    classes = np.sort(classes) if sort else classes
    pixels = np.tile(classes[:, None, None, None], (4, 4, 3)).astype(np.uint8)
    np.savez(tmp_path / "made.npz", arr_0=pixels)
    images = open_images(tmp_path / "made.npz")
    summary = collect_features(images, FourClasses(), Namespace(batch_size=64), num_kept=0)
    score, _ = summary.class_score
    # Splits of 40 random images have not quite equally many of each class.
    assert 3.8 < score < 3.95
    # ADM's evaluator takes splits in order: equally many of each, or one or two classes.
    assert summary.score_in_order == pytest.approx(1.2 if sort else 4.0)


class FourClasses:
    """Is certain that the class of an image is the value of its pixels."""

    about = NetworkName("four", "cd" * 32, "none")

    def __call__(self, images):
        classes = torch.nn.functional.one_hot(images[:, 0, 0, 0].long(), 4)
        return Activations(torch.randn(len(images), 2), 100.0 * classes)


def test_precision_and_recall_match_torch_fidelity(monkeypatch):
    # Force several blocks of distances.
    monkeypatch.setattr(set_metrics, "_BLOCK", 5000)
    first, second, _ = random_features()
    golden = (float(GOLDEN["precision"]), float(GOLDEN["recall"]))
    assert precision_and_recall(first, second) == pytest.approx(golden, rel=1e-6)


def test_precision_and_recall_match_the_paper():
    """Evaluate equations 1 and 2 of Kynkäänniemi et al. point by point."""
    random = np.random.RandomState(3)
    samples, reference = random.standard_normal((25, 3)), random.standard_normal((30, 3)) + 0.7

    def inside(point, others):
        for i, centre in enumerate(others):
            distances = sorted(
                np.linalg.norm(centre - other) for j, other in enumerate(others) if j != i
            )
            if np.linalg.norm(point - centre) <= distances[2 - 1]:
                return True
        return False

    expected = (
        np.mean([inside(point, reference) for point in samples]),
        np.mean([inside(point, samples) for point in reference]),
    )
    pair = (torch.from_numpy(samples), torch.from_numpy(reference))
    assert precision_and_recall(*pair, neighbors=2) == pytest.approx(expected)
    assert min(expected) > 0.2
    assert max(expected) < 0.95
    # The border of a ball is inside: of radius 1 around 3.
    line = torch.arange(4.0)[:, None]
    assert precision_and_recall(line + 4.0, line, neighbors=1) == (0.25, 0.25)
