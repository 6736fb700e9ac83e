"""Search of near-duplicate hashes against loops over all pairs."""

import numpy as np
import pytest

from data_tools import measurements
from data_tools.measurements import band_masks, close_pairs, find_duplicates

pytestmark = pytest.mark.once


def clustered_hashes(count, seed=0):
    """Return random hashes, half of them within 13 bits of another one."""
    random = np.random.default_rng(seed)
    hashes = random.integers(0, 2**64, count, dtype=np.uint64)
    for place in range(count // 2, count):
        flips = random.choice(64, int(random.integers(0, 14)), replace=False)
        mask = sum(1 << int(bit) for bit in flips)
        hashes[place] = int(hashes[int(random.integers(0, place))]) ^ mask
    return random.permutation(hashes)


def bits_apart(one, two):
    return (int(one) ^ int(two)).bit_count()


@pytest.mark.parametrize(
    ("distance", "count"),
    [
        # 10⁸ hashes within ten bits would be searched with 3,003 masks.
        *((distance, count) for distance in (0, 1, 4) for count in (300, 10**6, 10**8)),
        (10, 300),
        (10, 10**6),
    ],
)
def test_pairs_match_brute_force(distance, count, monkeypatch):
    """By the bands that so many hashes would be searched with."""
    masks = band_masks(count, distance=distance)
    monkeypatch.setattr(measurements, "band_masks", lambda *_, **__: masks)
    hashes = clustered_hashes(300)
    expected = [
        [i, j]
        for i in range(300)
        for j in range(i + 1, 300)
        if bits_apart(hashes[i], hashes[j]) <= distance
    ]
    assert len(expected) > 2
    assert close_pairs(hashes, distance=distance).tolist() == expected


def test_more_hashes_are_searched_by_more_bits():
    """Few are equal in all bits of a mask by chance, which is what takes time."""
    for count in (10**6, 10**7, 10**8, 10**9):
        masks = band_masks(count, distance=4)
        assert max(count / 2 ** mask.bit_count() for mask in masks) < 200, count
        assert len(masks) < 100


@pytest.mark.parametrize("num_fixed", [0, 40])
def test_duplicates_match_the_greedy_rule(num_fixed):
    hashes = clustered_hashes(300, seed=1)
    kept, expected = [], []
    for j in range(300):
        near = [i for i in kept if bits_apart(hashes[i], hashes[j]) <= 4]
        if j < num_fixed or not near:
            kept.append(j)
            expected.append(-1)
        else:
            expected.append(near[0])
    found = find_duplicates(hashes, distance=4, num_fixed=num_fixed)
    assert (found >= 0).tolist() == [of >= 0 for of in expected]
    for j in np.flatnonzero(found >= 0):
        assert found[found[j]] == -1
        assert bits_apart(hashes[j], hashes[found[j]]) <= 4
        assert (found[j] < num_fixed) == (expected[j] < num_fixed)


def test_empty_and_equal_hashes():
    assert find_duplicates(np.zeros(0, np.uint64), distance=4).tolist() == []
    crowd = np.zeros(50_000, np.uint64)
    assert find_duplicates(crowd, distance=4).tolist() == [-1] + [0] * 49_999


def test_what_is_only_close_to_a_dropped_one_is_kept():
    """Four bits from one hash to the next; the last is a copy of the dropped one."""
    chain = np.array([0x0, 0xF, 0xFF, 0xF], np.uint64)
    assert find_duplicates(chain, distance=4).tolist() == [-1, 0, -1, 0]
    copies = np.full(3, 0xF, np.uint64)
    assert find_duplicates(copies, distance=4, num_fixed=1).tolist() == [-1, 0, 0]
    assert find_duplicates(copies, distance=4, num_fixed=2).tolist() == [-1, -1, 0]
