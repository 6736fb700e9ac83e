"""Concatenated features of adjacent layers."""

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import adjacent_layers, divide, score_concatenated, score_layers

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("centre", "count", "expected"),
    [
        (30, 5, (28, 29, 30, 31, 32)),
        (1, 5, (0, 1, 2, 3, 4)),
        (60, 5, (56, 57, 58, 59, 60)),
        (30, 1, (30,)),
        (7, 61, tuple(range(61))),
    ],
)
def test_adjacent_layers_are_centred_on_the_best(centre, count, expected):
    # iGPT-XL has 60 blocks, hence 61 feature layers.
    assert adjacent_layers(centre, count=count, num_features=61) == expected


def test_too_many_layers_raise():
    with pytest.raises(UserError, match=r"--concatenate 6: .* features of 5 layers"):
        adjacent_layers(2, count=6, num_features=5)


def test_concatenation_combines_information_of_layers():
    """Each of three layers separates one class from the others."""
    random = np.random.default_rng(0)

    def draw(count):
        labels = np.arange(count) % 4
        layers = random.normal(0, 0.5, (4, count, 2)).astype(np.float32)
        for layer in range(3):
            layers[layer, labels == layer] += 3
        return LabelledFeatures(layers, labels, (layers + 0.01,))

    train, validation = draw(160), draw(80)
    selection = divide(train.labels, share=0.25, seed=0)

    score = score_concatenated("trained", train, validation, selection, centre=1, count=3)

    assert (score.layers, score.num_features) == ((0, 1, 2), 6)
    assert score.accuracy > 0.9 > 0.7 > score_layers(train, validation, selection)[1].accuracy
    assert score.vote_accuracy is not None
    concatenated = np.stack(
        [np.hstack([train.layers[layer][i] for layer in (0, 1, 2)]) for i in (0, 9)]
    )
    assert (train.concatenated((0, 1, 2)).layers[0][[0, 9]] == concatenated).all()
