"""The order in windows of shards: a bijection, random access, ranks, mixing and open files."""

from __future__ import annotations

import os
import resource
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from children import in_child
from loading import inputs_by_position
from shard_folder import write_folder

from benchmarks.sample_orders import buffered, epoch_of, mixing, opened
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.loading.blended_dataset import BlendedDataset
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.order import SampleOrder, WindowedOrder

pytestmark = pytest.mark.once
SIZES = [
    ([3, 1, 4, 1, 5, 9, 2, 6], 3),
    ([1] * 7, 1),
    ([10, 10, 10, 7], 2),
    ([5], 1),
    ([40, 1, 40, 2, 2, 2], 5),
    ([4, 4, 4], 9),
]
GOLDEN = [1183, 1637, 1783, 2695, 2653, 2968]


def plain_order(sizes, window_shards, seed, epoch):
    """Return an epoch in plain loops, given the permutations of shards and of windows."""
    order = WindowedOrder(sizes, window_shards, seed)
    count, samples = len(sizes), np.arange(sum(sizes))
    of_shards = np.split(samples, np.cumsum(sizes)[:-1])
    turns = SampleOrder(count, seed).dataset_index(np.arange(count) + epoch * count).tolist()
    num_windows = -(-count // window_shards)
    stream = []
    for window in range(num_windows):
        own = turns[window * count // num_windows : (window + 1) * count // num_windows]
        assert 1 <= len(own) <= window_shards
        held = np.concatenate([of_shards[shard] for shard in own])
        first = (epoch * num_windows + window) * len(held)
        places = SampleOrder(len(held), order._seed).dataset_index(first + np.arange(len(held)))
        stream += held[places].tolist()
    return stream


@pytest.mark.parametrize(("sizes", "window"), SIZES)
@pytest.mark.parametrize("epoch", [0, 1, 23])
def test_every_epoch_is_a_bijection_as_in_a_loop(sizes, window, epoch):
    order = WindowedOrder(sizes, window, 4)
    stream = epoch_of(order, epoch)
    assert sorted(stream.tolist()) == list(range(sum(sizes)))
    assert stream.tolist() == plain_order(sizes, window, 4, epoch)


def test_order_is_random_access():
    order = WindowedOrder([11, 7, 5, 13, 9, 10], 2, 1)
    positions = np.arange(40, 400)
    whole = order.dataset_index(positions)
    assert [int(order.dataset_index(np.array([p]))[0]) for p in positions] == whole.tolist()
    shuffled = np.random.default_rng(0).permutation(len(positions))
    assert (order.dataset_index(positions[shuffled]) == whole[shuffled]).all()
    grid = positions.reshape(36, 10)
    assert (order.dataset_index(grid) == whole.reshape(36, 10)).all()
    assert order.dataset_index(np.array([], np.int64)).shape == (0,)


def test_golden_values():
    """A changed order would silently change resumed runs."""
    order = WindowedOrder([1_000, 990, 1_000, 985, 1_000], 2, 1234)
    positions = np.array([0, 1, 2, 4_974, 4_975, 10**12])
    assert order.dataset_index(positions).tolist() == GOLDEN


def test_epochs_seeds_and_windows_differ():
    sizes = [20] * 50
    base = epoch_of(WindowedOrder(sizes, 10, 1), 0)
    for other in (
        epoch_of(WindowedOrder(sizes, 10, 1), 1),
        epoch_of(WindowedOrder(sizes, 10, 2), 0),
        epoch_of(WindowedOrder(sizes, 5, 1), 0),
    ):
        assert (base == other).mean() < 0.02
    # Windows of equal size are not permuted alike.
    places = (base % 20).reshape(5, 200)
    assert max((one == two).mean() for one, two in combinations(places, 2)) < 0.15


@pytest.mark.parametrize(("sizes", "window", "seed"), [([3], 0, 0), ([3, 0], 1, 0), ([3], 1, -1)])
def test_invalid_arguments(sizes, window, seed):
    with pytest.raises(ValueError, match="must"):
        WindowedOrder(sizes, window, seed)


def test_negative_position():
    with pytest.raises(ValueError, match="negative"):
        WindowedOrder([5, 5], 1, 0).dataset_index(np.array([-1]))


def test_memory_depends_on_shards_alone():
    order = WindowedOrder([10_000] * 10_000, 128, 0)
    positions = 10**11 + np.arange(256)
    tracemalloc.start()
    try:
        assert len(np.unique(order.dataset_index(positions))) == 256
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 0.5 * 2**20
    assert peak < 2 * 2**20


@pytest.mark.parametrize("window", [None, 4, 5, 1_000])
def test_one_window_is_the_order_of_all_samples(folder, window):
    dataset = ShardDataset(folder[0], window_shards=window)
    assert dataset.num_windows == 1
    positions = np.arange(200)
    wanted = SampleOrder(37, 3).dataset_index(positions)
    assert (dataset.order(3).dataset_index(positions) == wanted).all()


@pytest.mark.parametrize(("micro", "ranks", "start"), [(2, 3, 0), (3, 2, 2), (1, 12, 4)])
@pytest.mark.parametrize("blended", [False, True])
def test_neither_ranks_nor_resume_matter(folder, micro, ranks, start, blended):
    path, tokens, _ = folder
    dataset = ShardDataset(path, window_shards=2)
    if blended:
        dataset = BlendedDataset([dataset, ShardDataset(path, window_shards=1)], [2, 1])
    whole = inputs_by_position(dataset, micro=12, ranks=1, stop=5)
    parts = inputs_by_position(dataset, micro=micro, ranks=ranks, start=start, stop=5)
    assert sorted(parts) == list(range(12 * start, 60))
    assert all(torch.equal(row, whole[position]) for position, row in parts.items())
    if not blended:
        first_epoch = np.stack([whole[position].numpy() for position in range(37)])
        assert sorted(map(tuple, first_epoch.tolist())) == sorted(map(tuple, tokens.tolist()))


def test_windows_mix_as_well_as_a_buffer_of_half_as_many_samples():
    """Of 200 shards of 100 samples: a window of 20 shards has 2,000 samples.

    A buffer holds samples for a random time, on average as many as its size and often more.
    """
    measure = partial(mixing, num_shards=200, in_shard=100, kept_open=40)
    whole = measure(partial(epoch_of, SampleOrder(20_000, 0)))
    window = measure(partial(epoch_of, WindowedOrder([100] * 200, 20, 0)))
    buffer = measure(partial(buffered, 200, 100, 1_000))
    assert whole["neighbours"] == pytest.approx(1 / 200, abs=0.002)
    assert window["neighbours"] == pytest.approx(1 / 20, abs=0.005)
    assert window["neighbours"] < 1.25 * buffer["neighbours"]
    assert abs(whole["rank correlation"]) < 0.03
    assert abs(window["rank correlation"]) < 4 / np.sqrt(200), "as a permutation of 200 shards has"
    # Within a tenth of the epoch: 1 - 1 / 10^2.
    assert window["with shards in turn"] == pytest.approx(0.99, abs=0.001)
    assert buffer["with shards in turn"] == pytest.approx(0.99, abs=0.005)


def test_files_opened_per_thousand_samples():
    """Each file is opened once an epoch; in the order of all samples, for most samples."""
    sizes, count = [100] * 200, 20_000
    of_window = epoch_of(WindowedOrder(sizes, 20, 0), 0) // 100
    of_all = epoch_of(SampleOrder(count, 0), 0) // 100
    assert opened(of_window, 40) == 200, "10 a thousand samples"
    assert opened(of_all, 40) > 0.75 * count


def open_shards():
    """Return how many tars this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return sum(name.endswith(".tar") for name in names)


def read_with_many_threads(path, window_shards, hard):
    """Read an epoch in 16 threads; return the most open shards, the files opened and kept."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    dataset = ShardDataset(path, window_shards=window_shards)
    order, batches, most, calls = dataset.order(0), iter(range(300)), [0], []
    open_one = ShardDataset._open_shard
    ShardDataset._open_shard = lambda self, shard: calls.append(shard) or open_one(self, shard)

    def read():
        for number in batches:
            indices = order.dataset_index(np.arange(4 * number, 4 * number + 4))
            tokens, _ = dataset.read(indices)
            assert (tokens[:, 0] == indices % 512).all()
            if number % 10 == 0:
                most[0] = max(most[0], open_shards())

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(read) for _ in range(16)]:
            done.result()
    ShardDataset._open_shard = open_one
    return most[0], len(calls), dataset.most_open_shards


def read_in_both_orders(path):
    return [read_with_many_threads(path, window, 100) for window in (None, 10)]


def test_open_files_are_bounded(tmp_path):
    """Of 60 shards of 20 samples, with 100 descriptors."""
    tokens = (np.arange(1_200) % 512)[:, None].repeat(16, 1).astype(np.uint16)
    write_folder(tmp_path, tokens=tokens, labels=[-1] * 1_200, samples_per_shard=20, class_names=[])
    of_all, of_windows = in_child(read_in_both_orders, tmp_path)
    for (most, _, allowed), kept in ((of_all, 25), (of_windows, 20)):
        assert allowed == kept
        assert most <= kept + 16, "the kept ones, and one for each thread"
    assert of_all[1] > 500, "nearly half of all samples reopen a file"
    assert 60 <= of_windows[1] < 120, "each file once, and some again at borders"


def test_shard_that_cannot_be_opened_is_tried_again(folder):
    path, tokens, _ = folder
    dataset = ShardDataset(path, window_shards=1)
    tar = path / "shard-000001.tar"
    tar.rename(path / "away")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            dataset.read(np.array([12]))
    (path / "away").rename(tar)
    assert (dataset.read(np.array([12]))[0] == tokens[12]).all()


def test_file_that_becomes_shorter(folder):
    """A map of it would end the process with a signal."""
    path, tokens, _ = folder
    dataset = ShardDataset(path, window_shards=1)
    assert (dataset.read(np.array([12]))[0] == tokens[12]).all()
    os.truncate(path / "shard-000001.tar", 600)
    with pytest.raises(OSError, match=r"shorter than when it was opened: .*shard-000001\.tar"):
        dataset.read(np.array([12]))


def test_key_is_refused_with_a_subset(tmp_path):
    from tiny import tiny

    path = tmp_path / "c.yaml"
    path.write_text(tiny("{name: darl, patch_size: 4}"))
    assert load_config(path, ["data.window_shards=8"]).config.data.window_shards == 8
    with pytest.raises(UserError, match=r"data\.window_shards: mixes all images of shards"):
        load_config(path, ["data.window_shards=8", "data.images_per_class=2"])
