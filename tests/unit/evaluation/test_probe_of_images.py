"""Probe of a run on JPEG shards: pixel features and every layer."""

import numpy as np
import pytest
import torch

from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.features import pixel_features
from megavis.evaluation.networks import Network
from megavis.evaluation.probe import ProbeData, probe

pytestmark = pytest.mark.once


def test_pixel_features_are_scaled_pixels(image_shards):
    dataset = ShardDataset(image_shards / "validation")
    features = pixel_features(dataset, limit=3)
    images, _ = dataset.read(np.arange(3))
    assert features.layers.shape == (1, 3, 3 * 16 * 16)
    np.testing.assert_allclose(features.layers[0], images.reshape(3, -1) / 255.0 * 2 - 1, atol=1e-6)


def test_probe_scores_every_layer(build_gvp, image_shards):
    objective, inference = build_gvp("data.image_size=16")
    data = ProbeData(
        ShardDataset(image_shards / "train"),
        ShardDataset(image_shards / "validation"),
        None,
        60,
        30,
    )
    features = data.features(Network(objective, inference.context, lambda: inference))
    result = probe(features, [features], data, step=0)
    assert [score.layer for score in result.trained] == [0, 1, 2, 3]
    assert torch.tensor([score.accuracy for score in result.trained]).isfinite().all()
    assert 0 <= result.pixels.accuracy <= 1
