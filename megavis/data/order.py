"""The order in which samples are seen: a function of seed, epoch and dataset size alone.

Training consumes one endless stream of positions 0, 1, 2, ... Position p belongs to epoch p // N
and is permuted inside it. The permutation is computed, not stored: a Feistel network maps a
position to a data set index in O(1), so a run resumes anywhere without replaying, and the number
of ranks or workers cannot change what is seen.

The network works on pairs (left, right) of a grid of `rows x columns >= N` cells and adds a keyed
hash of one half to the other, modulo its size; each round can be undone, so the whole is a
bijection of the grid. Cells beyond N are walked on (permuted again) until they fall inside; the
grid exceeds N by less than `rows`, so that hardly ever happens.
"""

from __future__ import annotations

import math

import numpy as np

# Four rounds already give a good permutation; eight also break up patterns in tiny data sets.
_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SampleOrder:
    """Maps positions of the endless stream to data set indices.

    Args:
        num_samples: size N of the data set, 1 or more.
        seed: any non-negative integer below 2^64.

    Raises:
        ValueError: `num_samples` is not positive, or `seed` is out of range.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must lie in [0, 2^64), not {seed}")
        self.num_samples = num_samples
        self.seed = seed
        rows = math.isqrt(num_samples - 1) + 1  # the smallest whose square is at least N
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-num_samples // rows))
        start = np.array([seed], dtype=np.uint64)
        self._key = _mix(_mix(start + _GOLDEN) ^ np.uint64(num_samples))

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """Return the data set index of each position.

        Args:
            positions: int64 `[...]`, each at least 0.

        Returns:
            int64 `[...]` in [0, N); over the N positions of one epoch every index comes once.

        Raises:
            ValueError: a position is negative.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError("positions must not be negative")
        flat = positions.reshape(-1).astype(np.uint64)
        size = np.uint64(self.num_samples)
        epoch_keys = _mix(self._key + (flat // size) * _GOLDEN)
        index = self._permute(flat % size, epoch_keys)
        outside = np.flatnonzero(index >= size)
        while outside.size:
            index[outside] = self._permute(index[outside], epoch_keys[outside])
            outside = outside[index[outside] >= size]
        return index.astype(np.int64).reshape(positions.shape)

    def _permute(self, cells: np.ndarray, epoch_keys: np.ndarray) -> np.ndarray:
        left: np.ndarray = cells // self._columns
        right: np.ndarray = cells % self._columns
        for number in range(_NUM_ROUNDS):
            keys = epoch_keys + np.uint64(number + 1)
            if number % 2 == 0:
                left = (left + _mix(keys ^ _mix(right + _GOLDEN)) % self._rows) % self._rows
            else:
                right = (right + _mix(keys ^ _mix(left + _GOLDEN)) % self._columns) % self._columns
        return left * self._columns + right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: uint64 `[n]` to uint64 `[n]`, every output bit on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
