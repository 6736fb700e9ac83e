"""Images that stand for a folder: its first ones, or a random draw if it is sorted by class."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megavis.data.loading.dataset import representative
from megavis.training.pretraining import Pretraining

pytestmark = pytest.mark.once


class Labelled(list):
    directory = Path("shards/train")

    @property
    def labels(self):
        return np.array(self)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "shares", [[1] * 1000, [1] * 2, [99, 1], [1 / rank for rank in range(1, 2001)]]
)
def test_first_images_in_random_order_stand_for_all(shares, seed):
    random = np.random.default_rng(seed)
    labels = random.choice(len(shares), 20_000, p=np.array(shares) / sum(shares))
    labels[random.random(len(labels)) < 0.3] = -1
    images = Labelled(labels)
    for count in (50, 5000, None):
        assert representative(images, count) is images


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_images_of_a_sorted_folder_are_drawn(num_classes, capsys):
    images = Labelled(np.arange(20_000) // (20_000 // num_classes))
    drawn = representative(images, 5000, announces=True)
    assert capsys.readouterr().err == (
        "shards/train is sorted by class: 5,000 of its 20,000 images are drawn at random instead"
        " of the first ones\n"
    )
    assert len(drawn) == len(set(drawn.indices.tolist())) == 5000
    counts = np.bincount(drawn.labels, minlength=num_classes)
    assert (counts > 0).mean() > 0.98
    # In random order: no fifth of them is of a few classes.
    assert len(np.unique(drawn.labels[:1000])) > 0.55 * num_classes
    again = representative(images, 5000)
    np.testing.assert_array_equal(again.indices, drawn.indices)
    assert representative(images, 19_000) is images
    assert representative(images, None) is images


def test_images_without_labels_are_the_first_ones():
    images = Labelled([-1] * 1000)
    assert representative(images, 10) is images


def test_pretraining_is_not_validated_on_a_few_classes(capsys):
    config = SimpleNamespace(training=SimpleNamespace(patience=0, validation_images=256))
    context = SimpleNamespace(is_main=True)
    objective = SimpleNamespace(config=config, pretrained_key=None, context=context)
    task = Pretraining.open(objective, Labelled(np.arange(1000) // 100))
    assert len(set(task.validation.labels.tolist())) == 10
    assert "is sorted by class: 256 of its 1,000 images" in capsys.readouterr().err
