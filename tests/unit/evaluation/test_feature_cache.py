"""Feature cache: hits, misses, replacement and damaged files."""

from dataclasses import replace

import numpy as np
import pytest

from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.evaluation.features import FeatureCache, identity_of_data
from megavis.evaluation.networks import Network

pytestmark = pytest.mark.once


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "features")


@pytest.fixture
def network(build, tmp_path, cache):
    objective, inference = build(tmp_path / "c.yaml")
    return replace(
        Network(objective, inference.context, lambda: inference),
        cache=cache,
        identity={"weights": "these"},
    )


def counts(cache):
    return cache.num_computed, cache.num_read


def equal(one, other):
    return np.array_equal(one.layers, other.layers) and np.array_equal(one.labels, other.labels)


def test_cached_features_are_reused(network, cache, shard_folders):
    train = ShardDataset(shard_folders / "train")
    whole = network.features(train)
    assert counts(cache) == (1, 0)
    assert equal(network.features(ShardDataset(shard_folders / "train")), whole)
    assert equal(network.features(train, limit=30), whole.subset(np.arange(30)))
    assert counts(cache) == (1, 2)
    assert equal(replace(network, cache=None).features(train), whole)
    # Other images, weights or views miss the cache.
    network.features(ShardDataset(shard_folders / "validation"))
    replace(network, identity={"weights": "others"}).features(train, limit=3)
    twice = network.features(train, limit=3, num_views=2)
    assert counts(cache) == (4, 3)
    assert equal(network.features(train, limit=3, num_views=2), twice)
    assert counts(cache) == (4, 5)


def test_images_that_are_drawn_have_features_of_their_own(network, cache, shard_folders):
    train = ShardDataset(shard_folders / "train")
    whole = network.features(train)
    for drawn in ([7, 0, 12], [7, 0, 13]):
        chosen = np.array(drawn)
        found, expected = network.features(Subset(train, chosen), limit=3), whole.subset(chosen)
        np.testing.assert_allclose(found.layers, expected.layers, atol=1e-5)
        assert found.labels.tolist() == expected.labels.tolist()
    assert counts(cache) == (3, 0)
    network.features(Subset(train, np.array([7, 0, 12])), limit=3)
    assert counts(cache) == (3, 1)


def test_larger_entry_replaces_smaller(network, cache, shard_folders):
    train = ShardDataset(shard_folders / "train")
    network.features(train, limit=20)
    [small] = cache.folder.iterdir()
    network.features(train, limit=40)
    [large] = cache.folder.iterdir()
    assert (small.stem[-3:], large.stem[-3:]) == ("-20", "-40")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_file_is_recomputed(network, cache, shard_folders, damage):
    train = ShardDataset(shard_folders / "train")
    whole = network.features(train)
    [path] = cache.folder.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-100:]
    else:
        content[-1000] ^= 1
    path.write_bytes(content)
    assert equal(network.features(train), whole)
    assert counts(cache) == (2, 0)
    network.features(train)
    assert counts(cache) == (2, 1)


def test_data_identity_includes_labels(shard_folders):
    train = ShardDataset(shard_folders / "train")
    [shard] = train.manifest.shards
    key = identity_of_data(train)
    relabelled = shard.model_copy(update={"index_sha256": "0" * 64})
    train.manifest = train.manifest.model_copy(update={"shards": (relabelled,)})
    assert identity_of_data(train) != key
