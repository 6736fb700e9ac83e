"""Blended data sets: exact shares, order, manifests and classes."""

from __future__ import annotations

import os
import resource
from functools import partial

import numpy as np
import pytest
import torch
from children import in_child
from loading import inputs_by_position
from shard_folder import write_folder

from megavis.config.errors import UserError
from megavis.data.loading.blended_dataset import BlendedDataset
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.order import BlendedOrder, SampleOrder, block_counts

GOLDEN = [5, 13, 16, 3, 2, 12, 7, 9, 8, 11, 0, 1, 14, 6, 10]
MIXTURES = [
    ([37, 1000, 5], [0.7, 0.2, 0.1], [7, 2, 1]),
    ([12, 12], [1, 1], [1, 1]),
    ([9], [3.5], [1]),
    ([100, 20], [2, 0.5], [4, 1]),
]


def orders(sizes):
    return [partial(SampleOrder, size) for size in sizes]


def plain_order(order, sizes, num_blocks):
    """Yield the order in a plain loop: each block has the next samples of every source."""
    own = [
        iter(SampleOrder(n, o.seed).dataset_index(np.arange(10**4)).tolist())
        for n, o in zip(sizes, order._orders, strict=True)
    ]
    firsts = np.cumsum([0, *sizes])
    block = sum(order.counts)
    places = SampleOrder(block, order._slots.seed)
    for number in range(num_blocks):
        slots = [
            int(firsts[source]) + next(own[source])
            for source, count in enumerate(order.counts)
            for _ in range(count)
        ]
        for place in places.dataset_index(number * block + np.arange(block)):
            yield slots[place]


@pytest.mark.parametrize(("sizes", "weights", "counts"), MIXTURES)
def test_shares_and_order_match_a_loop(sizes, weights, counts):
    order = BlendedOrder(orders(sizes), weights, seed=11)
    assert order.counts == counts
    block = sum(counts)
    stream = order.dataset_index(np.arange(60 * block))
    assert stream.tolist() == list(plain_order(order, sizes, 60))
    source = np.searchsorted(np.cumsum(sizes), stream, side="right").reshape(60, block)
    for number, count in enumerate(counts):
        assert ((source == number).sum(axis=1) == count).all()


def test_sources_have_their_own_epochs():
    order = BlendedOrder(orders([6, 4]), [3, 2], seed=0)  # both end an epoch after two blocks
    stream = order.dataset_index(np.arange(100)).reshape(10, 10)
    assert (np.sort(stream, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in stream.tolist()}) == 10


def test_order_is_random_access():
    order = BlendedOrder(orders([1_281_167, 100_000_000]), [0.3, 0.7], seed=3)
    far = 10**12 + np.arange(50)
    assert order.dataset_index(far)[17] == order.dataset_index(far[17:18])[0]
    near = BlendedOrder(orders([10, 7]), [0.6, 0.4], seed=1).dataset_index(np.arange(15))
    assert near.tolist() == GOLDEN


def test_weights_without_a_short_block_are_approximated():
    counts = block_counts([1, np.pi, 1e-4])
    assert sum(counts) == 1 << 16
    shares = np.array([1, np.pi, 1e-4]) / (1 + np.pi + 1e-4)
    assert np.abs(np.array(counts) / (1 << 16) - shares).max() < 1 / (1 << 16)


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [], [1, 1e-9], [1]])
def test_invalid_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        BlendedOrder(orders([5, 5]), weights, seed=0)


@pytest.fixture
def mixed(tmp_path):
    """37 samples of classes a, b, c, and 5 of classes c, d with tokens 1; some are unlabelled."""
    random = np.random.default_rng(0)
    tokens = random.integers(2, 512, (37, 16))
    labels = random.integers(-1, 3, 37)
    write_folder(tmp_path / "one", tokens=tokens, labels=labels, class_names=["a", "b", "c"])
    write_folder(
        tmp_path / "two",
        tokens=np.ones((5, 16), int),
        labels=[0, 1, -1, 1, 0],
        class_names=["c", "d"],
    )
    parts = [ShardDataset(tmp_path / name) for name in ("one", "two")]
    return BlendedDataset(parts, [3, 1]), tokens, labels


def test_read_renumbers_classes(mixed):
    dataset, tokens, labels = mixed
    indices = np.array([41, 0, 36, 37, 39, 5, 38])
    read, read_labels = dataset.read(indices, positions=np.arange(7))
    every = np.concatenate([tokens, np.ones((5, 16), int)])
    known = np.concatenate([labels, [2, 3, -1, 3, 2]])
    assert (read == every[indices]).all()
    assert read_labels.tolist() == known[indices].tolist()
    assert dataset.labels.tolist() == known.tolist()
    assert dataset.class_names == dataset.manifest.class_names == ("a", "b", "c", "d")
    assert len(dataset) == dataset.manifest.num_samples == 42
    assert dataset.read(np.array([], np.int64))[0].shape == (0, 16)
    with pytest.raises(IndexError):
        dataset.read(np.array([42]))


def read_with_few_open_files(folders):
    """Read shards with room for at most ten more open files under the soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # a new descriptor has the lowest free number
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, hard))
    dataset = BlendedDataset([ShardDataset(folder) for folder in folders], [1, 1])
    return dataset.read(np.arange(60))[0]


def test_more_shards_than_the_soft_limit_of_open_files(tmp_path):
    tokens = np.arange(30)[:, None].repeat(16, axis=1)
    for name in ("one", "two"):
        write_folder(
            tmp_path / name,
            tokens=tokens,
            labels=[-1] * 30,
            samples_per_shard=1,
            class_names=[],
        )
    samples = in_child(read_with_few_open_files, [tmp_path / name for name in ("one", "two")])
    assert samples[:, 0].tolist() == [*range(30), *range(30)]


@pytest.mark.parametrize(("micro", "ranks", "start"), [(2, 3, 0), (3, 2, 2)])
def test_mixture_does_not_depend_on_ranks_or_resume(mixed, micro, ranks, start):
    whole = inputs_by_position(mixed[0], micro=12, ranks=1, stop=5)
    parts = inputs_by_position(mixed[0], micro=micro, ranks=ranks, start=start, stop=5)
    assert sorted(parts) == list(range(12 * start, 60))
    assert all(torch.equal(row, whole[position]) for position, row in parts.items())
    assert sum(int((row == 1).all()) for row in whole.values()) == 15


@pytest.mark.parametrize("key", ["image_size", "tokenizer.sha256"])
def test_incompatible_manifests(tmp_path, key):
    for name, tokens, colors in (("one", 16, 512), ("two", 16, 256), ("three", 64, 512)):
        write_folder(
            tmp_path / name,
            tokens=np.zeros((2, tokens), int),
            labels=[-1, -1],
            vocabulary=colors,
            class_names=[],
        )
    other = "two" if key == "tokenizer.sha256" else "three"
    parts = [ShardDataset(tmp_path / name) for name in ("one", other)]
    with pytest.raises(
        UserError, match=rf"{other}/manifest\.json: {key} is .* and .*one/manifest\.json"
    ):
        BlendedDataset(parts, [1, 1])


def test_replacements_come_from_the_same_folder(tmp_path):
    bad = np.zeros((3, 16), int)
    bad[1, 5] = 300
    for name, tokens in (("one", np.ones((2, 16), int)), ("two", bad)):
        write_folder(
            tmp_path / name,
            tokens=tokens,
            labels=range(len(tokens)),
            vocabulary=200,
            class_names=["x", "y", name],
        )
    dataset = BlendedDataset([ShardDataset(tmp_path / name) for name in ("one", "two")], [1, 1])
    samples, labels = dataset.read(np.array([0, 3, 2]))
    assert samples[:, 0].tolist() == [1, 0, 0]
    assert [dataset.class_names[label] for label in labels] == ["x", "two", "x"]
    assert dataset.skipped == {"token beyond the vocabulary": 1}
    assert dataset.skipped_names[0].startswith(f"{tmp_path}/two/shard-000000.tar:000000001")
