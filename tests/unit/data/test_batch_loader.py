"""Batch loading: independence of the layout, resuming, threads and errors."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader, evaluation_batches
from megavis.data.loading.order import SampleOrder


def take(dataset, steps, *, micro, ranks, accumulation, rank=0, start_step=0, seed=7, threads=4):
    loader = BatchLoader(
        dataset,
        seed=seed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        accumulation_steps=accumulation,
        start_step=start_step,
        threads=threads,
    )
    with loader:
        return list(itertools.islice(loader, steps * accumulation))


def test_micro_batches_match_explicit_loops(folder):
    path, tokens, labels = folder
    dataset = ShardDataset(path)
    micro, ranks, accumulation = 3, 2, 4
    order = SampleOrder(37, seed=7)
    for rank in range(ranks):
        batches = take(dataset, 5, micro=micro, ranks=ranks, accumulation=accumulation, rank=rank)
        for step in range(5):
            for m in range(accumulation):
                batch = batches[step * accumulation + m]
                for i in range(micro):
                    position = step * 24 + (m * ranks + rank) * micro + i
                    index = int(order.dataset_index(np.array([position]))[0])
                    assert batch.sample_index[i] == position
                    assert batch.inputs[i].tolist() == tokens[index].tolist()
                    assert batch.labels[i] == labels[index]
    assert batch.inputs.dtype == batch.labels.dtype == batch.sample_index.dtype == torch.int64


@pytest.mark.parametrize(
    ("micro", "ranks", "accumulation"), [(12, 1, 1), (3, 2, 2), (1, 4, 3), (2, 6, 1), (4, 1, 3)]
)
def test_steps_have_the_same_samples_in_every_layout(folder, micro, ranks, accumulation):
    dataset = ShardDataset(folder[0])
    seen = {}
    for rank in range(ranks):
        size = {"micro": micro, "ranks": ranks, "accumulation": accumulation}
        for number, batch in enumerate(take(dataset, 4, rank=rank, **size)):
            for index, row in zip(batch.sample_index.tolist(), batch.inputs, strict=True):
                assert index // 12 == number // accumulation
                seen[index] = row.tolist()
    whole = take(dataset, 4, micro=12, ranks=1, accumulation=1)
    expected = torch.cat([batch.inputs for batch in whole]).tolist()
    assert [seen[i] for i in range(48)] == expected


def test_resume_in_the_middle_of_an_epoch(folder):
    dataset = ShardDataset(folder[0])
    size = {"micro": 3, "ranks": 2, "accumulation": 2, "rank": 1}
    unbroken = take(dataset, 9, **size)
    resumed = take(dataset, 4, start_step=5, **size)
    for one, other in zip(unbroken[10:], resumed, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.sample_index, other.sample_index)
    far = take(dataset, 1, start_step=10**12, **size)
    assert far[0].sample_index[0] == 10**12 * 12 + 3


class Slow:
    """A data set whose later reads are faster than earlier ones; one read may fail."""

    directory = "slow"

    def __init__(self, failing=None):
        self.failing = failing

    def __len__(self):
        return 10

    def order(self, seed):
        return SampleOrder(10, seed)

    def read(self, indices, *, positions):
        number = positions[0] // len(positions)
        if number == self.failing:
            raise UserError("shard vanished")
        time.sleep(0.003 * (4 - number % 5))
        return positions[:, None].astype(np.uint16), np.zeros(len(indices), np.int64)


def open_loader(dataset, threads=3):
    return BatchLoader(
        dataset,
        seed=0,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        threads=threads,
    )


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_do_not_change_the_order(threads):
    size = {"micro": 2, "ranks": 1, "accumulation": 1}
    batches = take(Slow(), 20, threads=threads, **size)
    assert torch.cat([batch.inputs for batch in batches]).flatten().tolist() == list(range(40))
    resumed = take(Slow(), 5, threads=threads, start_step=15, **size)
    assert torch.equal(resumed[0].inputs, batches[15].inputs)


def test_threads_read_concurrently():
    meeting = threading.Barrier(3, timeout=600)  # breaks unless three reads run concurrently

    class Meets(Slow):
        def read(self, indices, *, positions):
            meeting.wait()
            return super().read(indices, positions=positions)

    with open_loader(Meets(), threads=3) as loader:
        next(loader)
        next(loader)
        next(loader)
        meeting.abort()


@pytest.mark.parametrize("threads", [1, 4])
def test_reader_errors_propagate(threads):
    loader = open_loader(Slow(failing=2), threads)
    assert [len(next(loader)) for _ in range(2)] == [2, 2]
    with pytest.raises(UserError, match="vanished"):
        next(loader)
    assert list(loader) == []
    assert running() == []


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_close_stops_the_threads(folder):
    dataset = ShardDataset(folder[0])
    with open_loader(dataset) as loader:
        next(loader)
        assert 1 <= len(running()) <= 3
    assert running() == []
    loader.close()
    assert list(loader) == []


def test_dropped_loader_stops_its_threads(folder):
    loader = open_loader(ShardDataset(folder[0]))
    next(loader)
    threads = running()
    assert threads
    del loader
    gc.collect()
    for thread in threads:
        thread.join(timeout=600)
        assert not thread.is_alive()


def test_process_exits_while_prefetching():
    script = """
import itertools, sys, time
from megavis.data.loading.loader import Prefetcher
items = Prefetcher(lambda number: time.sleep(0.01) or number, threads=4)
print(list(itertools.islice(items, 5)))
sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=600, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "[0, 1, 2, 3, 4]\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"micro_batch_size": 0},
        {"data_parallel_rank": 1},
        {"accumulation_steps": 0},
        {"start_step": -1},
        {"threads": 0},
    ],
)
def test_invalid_sizes(folder, wrong):
    sizes = {
        "seed": 0,
        "micro_batch_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
        "accumulation_steps": 1,
    }
    with pytest.raises(ValueError, match="must"):
        BatchLoader(ShardDataset(folder[0]), **{**sizes, **wrong})


@pytest.mark.parametrize(
    ("batch_size", "ranks", "limit", "expected"),
    [
        (4, 1, None, 37),
        (4, 2, None, 37),
        (8, 3, None, 37),
        (5, 2, 24, 24),
        (64, 2, 10, 10),
        (1, 3, 1000, 37),
        (2, 3, 1, 1),
    ],
)
def test_evaluation_batches(folder, batch_size, ranks, limit, expected):
    path, tokens, labels = folder
    dataset = ShardDataset(path)
    by_rank = [
        list(
            evaluation_batches(
                dataset,
                batch_size=batch_size,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                limit=limit,
            )
        )
        for rank in range(ranks)
    ]
    seen = []
    for together in zip(*by_rank, strict=True):
        sizes = [len(batch) for batch in together]
        assert max(sizes) <= min(batch_size, min(sizes) + 1)
        for batch in together:
            indices = batch.sample_index.numpy()
            assert (batch.inputs.numpy() == tokens[indices]).all()
            assert (batch.labels.numpy() == labels[indices]).all()
            seen.extend([] if batch.is_repeated else indices.tolist())
    assert seen == list(range(expected))


@pytest.mark.parametrize(("batch_size", "ranks"), [(4, 1), (4, 2), (8, 3), (64, 2)])
def test_bar_of_evaluation_ends_with_its_total(folder, batch_size, ranks, monkeypatch):
    totals = []

    def shown(parts, label, *, total, size):
        assert label == "images"
        totals.append(total)
        return parts

    monkeypatch.setattr("megavis.data.loading.loader.shown", shown)
    batches = evaluation_batches(
        ShardDataset(folder[0]), batch_size=batch_size, data_parallel_size=ranks
    )
    assert [sum(map(len, batches))] == totals


def test_evaluation_of_nothing_is_an_error(folder):
    with pytest.raises(UserError, match="no samples to evaluate"):
        evaluation_batches(ShardDataset(folder[0]), batch_size=1, limit=0)
