"""Training on a few images per class."""

from collections import Counter

import numpy as np
import pytest
from tiny import tiny

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset, subset_per_class

pytestmark = pytest.mark.once


@pytest.fixture
def dataset(image_shards):
    return ShardDataset(image_shards / "train", Transform(image_size=16))


def test_subset_per_class(dataset):
    few = subset_per_class(dataset, 2, seed=3)
    counts = Counter(few.labels.tolist())
    assert counts == {label: 2 for label in set(dataset.labels.tolist())}
    order = few.order(5)
    places = order.dataset_index(np.arange(2 * len(few)))
    assert sorted(places.tolist()) == sorted([*range(len(few))] * 2)
    images, labels = few.read(places[:4])
    for place, image, label in zip(places, images, labels, strict=False):
        whole, its_label = dataset.read(few.indices[[place]])
        assert np.array_equal(whole[0], image)
        assert its_label[0] == label


def test_subset_depends_on_the_seed(dataset):
    draws = [tuple(subset_per_class(dataset, 2, seed=seed).indices) for seed in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


def test_class_with_too_few_images(dataset):
    most = max(Counter(dataset.labels.tolist()).values())
    with pytest.raises(UserError, match=rf"class \d+ has \d+ .*, fewer than {most + 1}"):
        subset_per_class(dataset, most + 1, seed=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train=[{path: a, weight: 1}, {path: b, weight: 1}]"], "data.train names several"),
        (
            ["training.epochs=2", "data.num_images=100"],
            r"training\.epochs: counts all images",
        ),
    ],
)
def test_incompatible_keys(tmp_path, words, message):
    path = tmp_path / "c.yaml"
    path.write_text(tiny("{name: darl, patch_size: 4}"))
    with pytest.raises(UserError, match=message):
        load_config(path, ["data.images_per_class=2", *words])
