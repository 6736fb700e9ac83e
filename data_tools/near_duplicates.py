"""Near-duplicates by perceptual hash: an exact search in memory, for up to some ten million hashes.

Two hashes of 64 bits that differ in at most t bits are equal in one of t + 1 bands ("Fast Search in
Hamming Space with Multi-Index Hashing", Norouzi, Punjani and Fleet, section 3), so only pairs with
an equal band are compared.
"""

from __future__ import annotations

import itertools

import numpy as np

MAX_DISTANCE = 10  # beyond it bands are so narrow that most pairs share one
_BITS = 64


def close_pairs(hashes: np.ndarray, *, distance: int) -> np.ndarray:
    """Return all pairs of hashes uint64 `[n]` that differ in at most `distance` bits, 0 to 10.

    The result is int64 `[m, 2]`: sorted pairs of indices i < j.
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
    """Compare each hash with the following ones of the same band, at increasing distance."""
    found: list[np.ndarray] = []
    first = np.arange(len(band))
    for step in itertools.count(1):
        first = first[first + step < len(band)]
        # Sorted: bands that differ at this step differ at later ones too.
        first = first[band[first] == band[first + step]]
        if not len(first):
            return found
        near = first[np.bitwise_count(hashes[first] ^ hashes[first + step]) <= distance]
        found.append(np.stack([order[near], order[near + step]], axis=1))
    raise AssertionError("the loop ends by itself")


def find_duplicates(hashes: np.ndarray, *, distance: int, num_fixed: int = 0) -> np.ndarray:
    """Keep hashes uint64 `[n]` greedily: drop each one that is close to an earlier kept one.

    The first `num_fixed` are always kept. Returns int64 `[n]`: for dropped hashes the index of a
    close kept one; -1 for kept ones.
    """
    duplicate_of = np.full(len(hashes), -1, np.int64)
    if not len(hashes):
        return duplicate_of
    # A thousand copies of a placeholder would give half a million pairs: compare only the first
    # copy, since the others share its result.
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
