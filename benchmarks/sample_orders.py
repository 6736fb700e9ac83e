"""How well sample orders mix, and how many files they open: windows, all samples, a shuffle buffer.

    OMP_NUM_THREADS=1 python -m benchmarks.sample_orders

Nothing is read: orders are computed for synthetic shards of equal size, sorted by class as many
collections are. Shuffle buffers are webdataset's, over shards in a new random order each epoch, as
in its documentation. Columns, over one epoch unless stated otherwise:

    rank correlation    Spearman's, of the position in the epoch and the place on disk
    with shards in turn the same, if the shards lay on disk in the order in which the epoch reads
                        them: what samples move within it
    neighbours          share of consecutive samples from one shard; at random, 1 / shards
    shards in a batch   distinct shards among consecutive samples
    opened per 1,000    files opened for each thousand samples, with `--kept-open` of them open at
                        once; a buffer reads each file in one piece, and holds samples in memory
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.timing import parser, report
from megavis.data.loading.order import Order, SampleOrder, WindowedOrder

BATCH = 256
Stream = Callable[[int], np.ndarray]
"""The samples of an epoch, in their order, int64 `[N]`."""


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    """Return the samples of an epoch, in their order, int64 `[N]`."""
    return order.dataset_index(np.arange(order.num_samples) + epoch * order.num_samples)


def buffered(num_shards: int, in_shard: int, size: int, epoch: int) -> np.ndarray:
    """Return an epoch through webdataset's shuffle buffer, after a shuffle of the shards."""
    from webdataset.filters import shuffle

    rng = random.Random(epoch)  # noqa: S311 - as webdataset does
    shards = list(range(num_shards))
    rng.shuffle(shards)

    def samples() -> Iterator[int]:
        for shard in shards:
            yield from range(shard * in_shard, (shard + 1) * in_shard)

    mixed = shuffle(size, initial=size, rng=rng)(samples())
    return np.fromiter(mixed, np.int64)


def mixing(stream: Stream, num_shards: int, in_shard: int, *, kept_open: int) -> dict[str, float]:
    """Measure an order whose samples lie in shards of `in_shard`; see the columns above."""
    samples = stream(0)
    shards = samples // in_shard
    _, first_read = np.unique(shards, return_index=True)
    turn = np.argsort(np.argsort(first_read))  # of each shard in the epoch
    in_turn = turn[shards] * in_shard + samples % in_shard
    batches = shards[: len(shards) // BATCH * BATCH].reshape(-1, BATCH)
    return {
        "rank correlation": _correlation(samples),
        "with shards in turn": _correlation(in_turn),
        "neighbours": float((np.diff(shards) == 0).mean()),
        f"shards in {BATCH}": float(np.mean([len(np.unique(batch)) for batch in batches])),
        "opened per 1,000": 1_000 * opened(shards, kept_open) / len(shards),
    }


def opened(shards: np.ndarray, kept_open: int) -> int:
    """Count the files opened by a reader that closes the least recently read one."""
    kept, count = OrderedDict[int, None](), 0
    for shard in shards.tolist():
        if shard not in kept:
            count += 1
        kept[shard] = None
        kept.move_to_end(shard)
        if len(kept) > kept_open:
            kept.popitem(last=False)
    return count


def _correlation(places: np.ndarray) -> float:
    # Both are permutations, so that ranks are the values.
    return float(np.corrcoef(np.arange(len(places)), places)[0, 1])


def main() -> None:
    """Run the benchmark."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--shards", type=int, default=1_000)
    made.add_argument("--in-shard", type=int, default=1_000, help="samples in a shard")
    made.add_argument("--kept-open", type=int, default=256, help="files open at once")
    options = made.parse_args()
    count, each = options.shards, options.in_shard
    streams: dict[str, Stream] = {"all": partial(epoch_of, SampleOrder(count * each, 0))}
    for window in (256, 128, 64, 16):
        order = WindowedOrder([each] * count, window, 0)
        streams[f"windows of {window} shards"] = partial(epoch_of, order)
    for size in (100_000, 10_000, 1_000):
        streams[f"buffer of {size:,} samples"] = partial(buffered, count, each, size)
    rows = [
        {"order": name, **mixing(stream, count, each, kept_open=options.kept_open)}
        for name, stream in streams.items()
    ]
    for row in rows:
        if str(row["order"]).startswith("buffer"):
            row["opened per 1,000"] = 1_000 / each
    report(rows, options.json, shards=count, in_shard=each, kept_open=options.kept_open)


if __name__ == "__main__":
    main()
