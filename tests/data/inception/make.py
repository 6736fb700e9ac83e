"""Write golden.npz: what torch-fidelity 0.4.0 makes of random weights, images and features.

It wants torchvision, which does not load beside every torch, so the tests have what it said:
PYTHONPATH=tests/support:. python tests/data/inception/make.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from inception_weights import random_features, random_images, random_weights
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric


def network_outputs():
    """Features, logits and, from a hook, the spatial features, of small and of large images."""
    arrays, spatial = {}, []
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(random_weights(), file.name)
        names = ["2048", "logits_unbiased"]
        network = FeatureExtractorInceptionV3("golden", names, file.name)
    network.Mixed_6d.branch1x1.register_forward_hook(lambda _, __, out: spatial.append(out))
    for size in (32, 331):
        images = random_images(2, size).movedim(3, 1).contiguous()
        features, logits = network(images)
        arrays[f"features_{size}"], arrays[f"logits_{size}"] = features, logits
        arrays[f"spatial_{size}"] = spatial.pop()[:, :7].movedim(1, 3).flatten(1)
    return arrays


def metrics():
    """The three metrics of the same random features and logits."""
    first, second, logits = random_features()
    statistics = [fid_features_to_statistics(part.double()) for part in (first, second)]
    return {
        **fid_statistics_to_metric(*statistics, verbose=False),
        **isc_features_to_metric(logits, shuffle=False),
        **prc_features_to_metric(first, second, verbose=False),
    }


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).with_name("golden.npz"), **network_outputs(), **metrics())
