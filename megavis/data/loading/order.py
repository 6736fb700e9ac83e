"""The sample order: a function of seed, epoch and data set size.

Training consumes an endless stream of positions 0, 1, 2, ... Position p belongs to epoch p // N
and is permuted within it. A Feistel network computes the data set index of a position in O(1), so a
run resumes at any position without replaying the stream, and the order does not depend on the
number of ranks or workers.

The network acts on pairs (left, right) of a grid of `rows x columns >= N` cells and adds a keyed
hash of one half to the other, modulo its size. Each round is invertible, so the network is a
bijection of the grid. Cells at or beyond N are permuted again until they fall below N (cycle
walking), which is rare, since the grid exceeds N by less than `rows`.

A random order over many shards needs all of them open at once. With windows, the shards of an epoch
are permuted and cut into windows, and a separate network permutes the samples of each window; a
table of shards, never of samples, holds where windows begin.

Several data sets are blended in blocks of T positions, of which source k gets exactly c_k. A
permutation of the same kind maps a position to one of the T slots of its block; slots
[start_k, start_k + c_k) belong to source k, and slot start_k + j of block B is position B c_k + j
of that source's own endless stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

# Four rounds suffice for large data sets; eight also break up patterns in tiny ones.
_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Longest block of a blend: rounded weights are off by less than 1 / 65,536.
_MAX_BLOCK = 1 << 16


class Order(Protocol):
    """Maps positions of the endless stream to samples.

    Attributes:
        num_samples: size N of the data set; an epoch is as long.
    """

    @property
    def num_samples(self) -> int: ...  # noqa: D102 - see above

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """Map positions, int64 `[...]`, to data set indices, int64 `[...]`."""


class SampleOrder:
    """Permutes each epoch of the endless stream by a Feistel network.

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
        rows = math.isqrt(num_samples - 1) + 1  # ceil(sqrt(N))
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-num_samples // rows))
        start = np.array([seed], dtype=np.uint64)
        # Include the size: windows of several sizes share a seed, but need different permutations.
        self._key = _mix(_mix(start + _GOLDEN) ^ np.uint64(num_samples))

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """Return the data set index in [0, N) of each position; each occurs once per epoch.

        Raises:
            ValueError: a position is negative.
        """
        positions = _checked(positions)
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


class WindowedOrder:
    """Permutes the shards of each epoch, and the samples within each window of shards.

    A window has at most `window_shards` shards; sizes of windows differ by at most one shard. Its
    samples are permuted like an epoch, and no other sample is read in between.

    Args:
        shard_sizes: number of samples of each shard, positive.
        window_shards: 1 or more.
        seed: any non-negative integer below 2^64.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, shard_sizes: Sequence[int], window_shards: int, seed: int) -> None:
        if window_shards < 1 or min(shard_sizes) < 1:
            raise ValueError("window_shards and sizes of shards must be at least 1")
        self._first = np.cumsum([0, *shard_sizes])
        self.num_samples = int(self._first[-1])
        num_shards = len(shard_sizes)
        self._num_windows = -(-num_shards // window_shards)
        self._bounds = np.arange(self._num_windows + 1) * num_shards // self._num_windows
        self._shards = SampleOrder(num_shards, seed)
        self._seed = _derived(seed)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """Return the data set index in [0, N) of each position; each occurs once per epoch.

        Raises:
            ValueError: a position is negative.
        """
        positions = _checked(positions)
        epochs, places = np.divmod(positions.reshape(-1), self.num_samples)
        index = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            index[here] = self._in_epoch(epoch, places[here])
        return index.reshape(positions.shape)

    def window_at(self, position: int) -> int:
        """Return the window of a position, counted from the first of epoch 0."""
        epoch, place = divmod(position, self.num_samples)
        bounds = self._shards_of_epoch(epoch)[1][self._bounds]
        window = int(np.searchsorted(bounds, place, side="right")) - 1
        return epoch * self._num_windows + window

    def shards_in(self, window: int) -> list[int]:
        """Return the shards of a window, counted as `window_at` does."""
        epoch, place = divmod(window, self._num_windows)
        shards, _ = self._shards_of_epoch(epoch)
        return shards[self._bounds[place] : self._bounds[place + 1]].tolist()

    def _in_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        shards, starts = self._shards_of_epoch(epoch)
        bounds = starts[self._bounds]
        windows = np.searchsorted(bounds, places, side="right") - 1
        permuted = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here, begin = windows == window, int(bounds[window])
            own = SampleOrder(int(bounds[window + 1]) - begin, self._seed)
            # Each window is an epoch of a network of its size. The epoch number counts all windows,
            # so windows of one size differ within an epoch and between epochs.
            turn = epoch * self._num_windows + window
            place = turn * own.num_samples + places[here] - begin
            permuted[here] = begin + own.dataset_index(place)
        slots = np.searchsorted(starts, permuted, side="right") - 1
        return self._first[shards[slots]] + permuted - starts[slots]

    def _shards_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards in their order, and the place in the epoch at which each starts."""
        found = self._epochs.get(epoch)
        if found is None:
            num_shards = self._shards.num_samples
            shards = self._shards.dataset_index(np.arange(num_shards) + epoch * num_shards)
            found = shards, np.cumsum([0, *np.diff(self._first)[shards]])
            # Threads may still read the previous epoch. Replacing the whole dict needs no lock.
            self._epochs = dict([*self._epochs.items()][-1:]) | {epoch: found}
        return found


class RepeatedOrder:
    """Repeated Augmentation: each sample occurs several times in a batch, with different draws.

    "Augment Your Batch" (Hoffer et al.). DeiT's sampler repeats the indices of an epoch and deals
    them out to the processes, so that copies of an image are never adjacent on a process. Here
    copies are `APART` positions apart, so that Mixup never mixes them and the order does not depend
    on the number of processes.
    """

    APART = 32

    def __init__(self, order: Order, repeats: int) -> None:
        self._order, self._repeats = order, repeats
        self.num_samples = order.num_samples * repeats

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        block, place = np.divmod(positions, self._repeats * self.APART)
        return self._order.dataset_index(block * self.APART + place % self.APART)


class BlendedOrder:
    """Blends several data sets, whose samples are indexed one data set after another.

    Each source has its own epochs, in its own order. In the positions [B T, (B + 1) T) of a
    block, source k occurs exactly c_k times; a block is as short as the weights allow (10 for 0.7
    and 0.3).

    Args:
        orders: function from a seed to the order, for each source.
        weights: relative weights of the sources, positive.
        seed: any non-negative integer below 2^64.

    Attributes:
        counts: c_k, samples of each source in one block; their sum is T.
        num_samples: samples of all sources together.

    Raises:
        ValueError: a weight or the seed is out of range, or there are not as many weights as
            orders.
    """

    def __init__(
        self, orders: Sequence[Callable[[int], Order]], weights: Sequence[float], *, seed: int
    ) -> None:
        if len(orders) != len(weights):
            raise ValueError(f"there are {len(orders)} orders but {len(weights)} weights")
        self.counts = block_counts(weights)
        # Each source has its own seed: sources of equal size must not be permuted alike.
        self._orders = [order(_derived(seed) ^ k) for k, order in enumerate(orders)]
        self._slots = SampleOrder(sum(self.counts), seed)
        self._starts = np.cumsum([0, *self.counts])
        self._firsts = np.cumsum([0, *(order.num_samples for order in self._orders)])
        self.num_samples = int(self._firsts[-1])

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """Return the index of each position in the concatenated sources, in [0, sum of sizes).

        Raises:
            ValueError: a position is negative.
        """
        positions = np.asarray(positions, dtype=np.int64)
        slots = self._slots.dataset_index(positions)
        blocks = positions // self._slots.num_samples
        sources = np.searchsorted(self._starts, slots, side="right") - 1
        index = np.empty_like(positions)
        for number, order in enumerate(self._orders):
            here = sources == number
            own = blocks[here] * self.counts[number] + slots[here] - self._starts[number]
            index[here] = self._firsts[number] + order.dataset_index(own)
        return index


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the number of samples of each source in one block of a blend.

    The counts are exact if the weights, as decimal numbers, allow a block of at most 65,536.
    Otherwise they are computed for a block of 65,536, rounded by the largest remainder method.

    Raises:
        ValueError: a weight is not positive, or so small that its count would be 0.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights must be positive, not {list(weights)}")
    # Use the decimal digits: as a float, 0.7 is a fraction with denominator 2^52, which would give
    # every block the maximum length.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    block = min(math.lcm(*(share.denominator for share in shares)), _MAX_BLOCK)
    counts = [int(share * block) for share in shares]
    by_remainder = sorted(
        range(len(shares)), key=lambda k: shares[k] * block - counts[k], reverse=True
    )
    for k in by_remainder[: block - sum(counts)]:
        counts[k] += 1
    if min(counts) == 0:
        raise ValueError(f"weights must lie within a factor of {_MAX_BLOCK}, not {list(weights)}")
    return counts


def _checked(positions: np.ndarray) -> np.ndarray:
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and positions.min() < 0:
        raise ValueError("positions must not be negative")
    return positions


def _derived(seed: int) -> int:
    return int(_mix(np.array([seed], np.uint64) + _GOLDEN)[0])


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 `[n]` by SplitMix64's finalizer."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
