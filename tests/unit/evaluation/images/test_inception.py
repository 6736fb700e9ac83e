"""The Inception network against torch-fidelity's outputs for the same weights and images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from inception_weights import random_images, random_weights

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.evaluation.images import feature_networks
from megavis.evaluation.images.feature_networks import Inception, InceptionFeatures

pytestmark = pytest.mark.once

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "inception" / "golden.npz")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(random_weights(), path)
    return path


@pytest.mark.parametrize("size", [32, 331])
def test_features_match_torch_fidelity(weights_file, size, monkeypatch):
    # Metrics count as published only with the published weights, identified by their hash.
    if size == 331:
        monkeypatch.setattr(feature_networks, "PUBLISHED_WEIGHTS", sha256_of_file(weights_file)[:8])
    network = InceptionFeatures(weights_file, CPU)
    assert network.about.is_published == (size == 331)
    seen = network(random_images(2, size))
    for name in ("features", "logits", "spatial"):
        golden = torch.from_numpy(GOLDEN[f"{name}_{size}"])
        torch.testing.assert_close(getattr(seen, name), golden, rtol=1e-5, atol=1e-5)


def test_incompatible_weights_raise():
    with pytest.raises(UserError, match="not the weights of Inception: Missing key"):
        Inception.from_weights({"fc.weight": torch.zeros(1008, 2048)})
