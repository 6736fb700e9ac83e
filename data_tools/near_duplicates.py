"""Near-duplicates by perceptual hash: an exact search in memory, for up to some ten million.

Two hashes of 64 bits that differ in at most t of them agree wholly in one of t + 1 bands (Norouzi,
Punjani and Fleet, Fast Search in Hamming Space with Multi-Index Hashing, section 3): only pairs
that share a band are compared.
"""

from __future__ import annotations

import itertools

import numpy as np

MAX_DISTANCE = 10  # beyond it bands are so narrow that everything is compared with everything
_BITS = 64


def close_pairs(hashes: np.ndarray, *, distance: int) -> np.ndarray:
    """Return all pairs of hashes that differ in at most `distance` bits.

    Args:
        hashes: uint64 `[n]`.
        distance: 0 to 10.

    Returns:
        int64 `[m, 2]`: places i < j, sorted.
    """
    found = [np.empty((0, 2), np.int64)]
    edges = np.linspace(0, _BITS, distance + 2).round().astype(int).tolist()
    for low, high in itertools.pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(band, kind="stable")
        found += _pairs_of_band(band[order], hashes[order], order, distance)
    pairs = np.sort(np.concatenate(found), axis=1)
    return np.unique(pairs, axis=0)


def _pairs_of_band(
    band: np.ndarray, hashes: np.ndarray, order: np.ndarray, distance: int
) -> list[np.ndarray]:
    """Compare each hash with the following ones of the same band, one step further each time."""
    found: list[np.ndarray] = []
    first = np.arange(len(band))
    for step in itertools.count(1):
        first = first[first + step < len(band)]
        # Sorted: what is not the same one step away is not the same further on.
        first = first[band[first] == band[first + step]]
        if not len(first):
            return found
        near = first[np.bitwise_count(hashes[first] ^ hashes[first + step]) <= distance]
        found.append(np.stack([order[near], order[near + step]], axis=1))
    raise AssertionError("the loop ends by itself")


def find_duplicates(hashes: np.ndarray, *, distance: int, num_fixed: int = 0) -> np.ndarray:
    """Keep each hash that is not close to an earlier one that is kept.

    Args:
        hashes: uint64 `[n]`, the ones to prefer first.
        distance: in bits, 0 to 10.
        num_fixed: so many at the beginning are kept whatever they are close to.

    Returns:
        int64 `[n]`: place of the kept one that each dropped one is close to; -1 where it is kept.
    """
    duplicate_of = np.full(len(hashes), -1, np.int64)
    if not len(hashes):
        return duplicate_of
    # A thousand copies of one placeholder would give half a million pairs: only the first is
    # compared with others, since the rest share its fate.
    _, places, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = places[inverse]
    firsts = np.sort(places)
    pairs = firsts[close_pairs(hashes[firsts], distance=distance)]
    for i, j in pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))].tolist():
        if j >= num_fixed and duplicate_of[j] < 0 and duplicate_of[i] < 0:
            duplicate_of[j] = i
    copies = np.flatnonzero((first_of != np.arange(len(hashes))) & (duplicate_of < 0))
    copies = copies[copies >= num_fixed]
    kept = duplicate_of[first_of[copies]] < 0
    duplicate_of[copies] = np.where(kept, first_of[copies], duplicate_of[first_of[copies]])
    return duplicate_of
