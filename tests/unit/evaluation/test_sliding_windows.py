"""Segmentation of images of any size: windows against one pass, and against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import VIT, tiny

from megavis.data.codecs.crops import resize
from megavis.evaluation.segmentation import sliding_logits

pytestmark = pytest.mark.once


@pytest.fixture
def network(build_paper):
    """A network for three classes of windows of 16 pixels."""
    text = tiny("{name: mae, patch_size: 4}", model=VIT)
    finetune = "finetune: {task: segments, num_classes: 3, head_width: 8}"
    words = "data.validation=held", "training.validate_every=1"
    return build_paper(f"{text}\n{finetune}\n", *words, std=0.2)


def picture(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def logits_of(network, windows):
    objective, inference = network
    predictions = inference.predictions(objective.inputs_from(torch.from_numpy(windows)))
    return F.interpolate(objective.outputs(predictions), size=(16, 16), mode="bilinear")


def test_one_window_is_the_whole_image(network):
    objective, inference = network
    image = picture(16, 16)
    found = sliding_logits(inference, objective, image, stride=16)
    torch.testing.assert_close(found, logits_of(network, image[None]))


def test_windows_are_averaged(network):
    """26 by 16 pixels in steps of 6 are windows at rows 0, 6 and 10."""
    objective, inference = network
    image = picture(26, 16)
    sums, counts = np.zeros((3, 26, 16)), np.zeros((26, 16))
    for top in (0, 6, 10):
        own = logits_of(network, image[None, top : top + 16])[0].double().numpy()
        for row in range(16):
            for column in range(16):
                counts[top + row, column] += 1
                sums[:, top + row, column] += own[:, row, column]
    found = sliding_logits(inference, objective, image, stride=6)
    np.testing.assert_allclose(found[0].numpy(), sums / counts, rtol=1e-4, atol=1e-5)


def test_shorter_side_is_resized_to_the_windows(network):
    objective, inference = network
    large = picture(33, 48)
    small = resize(large, height=16, width=23)
    expected = sliding_logits(inference, objective, small, stride=5)
    found = sliding_logits(inference, objective, large, stride=5)
    assert found.shape == (1, 3, 16, 23)
    assert torch.equal(found, expected)
