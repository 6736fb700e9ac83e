"""Sample order: a bijection per epoch, golden values, uniformity."""

from __future__ import annotations

import numpy as np
import pytest

from megavis.data.loading.order import SampleOrder

GOLDEN = [987196, 136988, 660611, 1006879, 1168981, 406577]
GOLDEN_TEN = [9, 7, 0, 6, 1, 2, 4, 8, 5, 3, 0, 4, 5, 8, 9, 2, 1, 3, 7, 6]
GOLDEN_NINE = [
    2,
    8,
    1,
    4,
    3,
    6,
    7,
    5,
    0,
    7,
    0,
    4,
    1,
    8,
    2,
    5,
    6,
    3,
]  # a square, whose grid has no cell to spare
SIZES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    63,
    64,
    65,
    100,
    255,
    256,
    257,
    999,
    4095,
    4097,
    50_001,
]


@pytest.mark.parametrize("num_samples", SIZES)
def test_every_epoch_is_a_bijection(num_samples):
    order = SampleOrder(num_samples, seed=3)
    for epoch in (0, 1, 17):
        positions = np.arange(num_samples) + epoch * num_samples
        assert sorted(order.dataset_index(positions)) == list(range(num_samples))


def test_order_is_elementwise():
    order = SampleOrder(1000, seed=1)
    positions = np.arange(500, 3500)
    whole = order.dataset_index(positions)
    one_by_one = [int(order.dataset_index(np.array([p]))[0]) for p in positions[::37]]
    assert one_by_one == whole[::37].tolist()
    grid = positions.reshape(30, 100)
    assert (order.dataset_index(grid) == whole.reshape(30, 100)).all()


def test_epochs_seeds_and_sizes_differ():
    positions = np.arange(1000)
    base = SampleOrder(1000, seed=1).dataset_index(positions)
    for other in (
        SampleOrder(1000, seed=1).dataset_index(positions + 1000),
        SampleOrder(1000, seed=2).dataset_index(positions),
        SampleOrder(1001, seed=1).dataset_index(positions),
    ):
        assert (base == other).mean() < 0.02


def test_golden_values():
    """A changed order would silently change resumed runs."""
    order = SampleOrder(1_281_167, seed=1234)
    positions = np.array([0, 1, 2, 1_281_166, 1_281_167, 10**12])
    assert order.dataset_index(positions).tolist() == GOLDEN
    assert SampleOrder(10, seed=0).dataset_index(np.arange(20)).tolist() == GOLDEN_TEN
    assert SampleOrder(9, seed=0).dataset_index(np.arange(18)).tolist() == GOLDEN_NINE


def test_order_is_uniform():
    """Chi-square of the index at fixed positions, and of the difference of neighbours."""
    size, epochs, bins = 100, 2000, 10
    order = SampleOrder(size, seed=5)
    grid = order.dataset_index(np.arange(size * epochs)).reshape(epochs, size)
    for values in (grid[:, 0], grid[:, 57], (grid[:, 11] - grid[:, 10]) % size):
        counts = np.bincount(values * bins // size, minlength=bins)
        expected = epochs / bins
        # 99.99 % of chi-square with 9 degrees of freedom is below 33.7; differences are never 0,
        # which lowers the first bin by a tenth.
        assert ((counts - expected) ** 2 / expected).sum() < 45
    mean = grid.mean(axis=0)
    assert np.abs(mean - (size - 1) / 2).max() < 5 * np.sqrt(size**2 / 12 / epochs)


def test_batches_are_uniform():
    """Counts of 128 consecutive samples per tenth of the data set have the binomial variance."""
    size = 12_800
    index = SampleOrder(size, seed=9).dataset_index(np.arange(size)).reshape(-1, 128)
    counts = np.stack([np.bincount(row * 10 // size, minlength=10) for row in index])
    variance = counts.var(axis=0).mean()
    assert 0.75 < variance / (128 * 0.1 * 0.9) < 1.25


@pytest.mark.parametrize(("size", "seed"), [(0, 0), (-1, 0), (5, -1), (5, 2**64)])
def test_invalid_arguments(size, seed):
    with pytest.raises(ValueError, match="must"):
        SampleOrder(size, seed)


def test_negative_position():
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(5, 0).dataset_index(np.array([-1]))
