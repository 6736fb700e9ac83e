"""Fetching ahead, in orders of events that are forced: nothing is fetched twice for one window."""

from __future__ import annotations

from collections import Counter
from threading import Event, Thread

import numpy as np
import pytest
from shard_folder import write_folder

from megavis.data.loading import loader
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.disk_cache import FullCacheError
from megavis.data.loading.loader import BatchLoader, InTurn
from megavis.data.loading.order import WindowedOrder
from megavis.data.loading.read_ahead import ReadAhead

SHARDS, SAMPLES = 8, 6
WINDOWS = WindowedOrder([SAMPLES] * SHARDS, 2, 5)
LONG = 120


class File:
    """A held shard."""

    def __init__(self):
        self.closed = Event()

    def close(self):
        self.closed.set()


class Cache:
    """Holds whatever it is asked for; `stop` makes the fetch of a shard wait for `go_on`."""

    def __init__(self):
        self.held, self.refused, self.left = {}, [], []
        self.stop, self.reached, self.go_on = None, Event(), Event()
        self.changed, self.late = Event(), Event()

    def hold(self, shard, needed):
        if shard == self.stop:
            self.reached.set()
            assert self.go_on.wait(LONG)
        if shard not in needed():
            self.refused.append(shard)
            self.late.set()
            return None
        self.held[shard] = File()
        if len(self.held) >= 4:
            self.changed.set()
        return self.held[shard]


def read_ahead(cache, most=SHARDS):
    return ReadAhead(WINDOWS, cache.hold, cache.left.append, most=most)


def first_of(window):
    return np.array([window * 2 * SAMPLES])


def kept(ahead, shards):
    """Wait until these are held."""
    with ahead._changed:
        waits = Event()
    for _ in range(LONG * 100):
        if shards <= ahead._held.keys():
            return True
        waits.wait(0.01)
    return False


def test_shards_are_held_until_they_are_opened_or_left():
    cache = Cache()
    ahead = read_ahead(cache)
    now, soon, later = (set(WINDOWS.shards_in(window)) for window in range(3))
    ahead.begin(first_of(0))
    assert kept(ahead, now | soon)
    one, other = now
    ahead.opened(one)
    assert {shard for shard, file in cache.held.items() if file.closed.is_set()} == {one}
    ahead.end()
    ahead.begin(first_of(1))
    assert cache.held[other].closed.is_set(), "nobody reads its window any more"
    assert not any(cache.held[shard].closed.is_set() for shard in soon - now)
    assert kept(ahead, soon | later)
    ahead.close()
    assert all(file.closed.is_set() for file in cache.held.values())


def test_a_reader_without_room_gets_the_next_window_first():
    cache = Cache()
    ahead = read_ahead(cache)
    now, soon = (set(WINDOWS.shards_in(window)) for window in range(2))
    ahead.begin(first_of(0))
    assert kept(ahead, now | soon)
    assert ahead.make_way() == now
    assert {shard for shard, file in cache.held.items() if file.closed.is_set()} == soon
    assert not ahead.make_way()
    assert all(file.closed.is_set() for file in cache.held.values())
    ahead.close()


def test_no_more_are_held_than_may_be():
    cache = Cache()
    ahead = read_ahead(cache, most=0)
    ahead.begin(first_of(0))
    assert cache.changed.wait(LONG)
    ahead.close()
    for thread in ahead._threads:
        thread.join(LONG)
    assert all(file.closed.is_set() for file in cache.held.values())


def test_a_fetch_that_is_late_is_not_made():
    """A thread that took a shard is stopped until its window has been read without it."""
    cache = Cache()
    ahead = read_ahead(cache)
    cache.stop = WINDOWS.shards_in(0)[0]
    ahead.begin(first_of(0))
    assert cache.reached.wait(LONG)
    ahead.end()
    ahead.begin(first_of(2))
    cache.go_on.set()
    assert cache.late.wait(LONG)
    ahead.close()
    assert cache.refused == [cache.stop]


def test_what_has_no_room_is_tried_again():
    full, tried = Event(), Counter()

    def hold(shard, needed):
        tried[shard] += 1
        if tried[shard] == 1:
            raise FullCacheError
        if set(tried) == needed() and min(tried.values()) > 1:
            full.set()
        return File()

    ahead = ReadAhead(WINDOWS, hold, lambda _: None, most=SHARDS)
    ahead.begin(first_of(0))
    assert full.wait(LONG)
    ahead.close()


def test_numbers_are_done_in_turn():
    in_turn, done, started = InTurn(3), [], Event()

    def late():
        started.set()
        in_turn(4, lambda: done.append(4))

    thread = Thread(target=late)
    thread.start()
    assert started.wait(LONG)
    thread.join(0.05)
    assert not done
    with pytest.raises(ZeroDivisionError):
        in_turn(3, lambda: done.append(3) or 1 / 0)
    thread.join(LONG)
    assert done == [3, 4]


class Reversed:
    """A pool whose threads, from the last of every four on, start before those of earlier work."""

    def __init__(self, *_, **__):
        self._waiting = []

    def submit(self, do, number):
        future = loader.Future()
        self._waiting.append((do, number, future))
        if len(self._waiting) == 4:
            jobs, self._waiting = self._waiting[::-1], []
            for job in jobs:
                Thread(target=self._run, args=job, daemon=True).start()
        return future

    @staticmethod
    def _run(do, number, future):
        try:
            future.set_result(do(number))
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self, **_):
        pass


def test_a_loader_begins_batches_in_order_whichever_thread_comes_first(tmp_path, monkeypatch):
    """A window would be left, and its shards evicted, before its last batch was read."""
    tokens = np.zeros((SHARDS * SAMPLES, 4), np.uint16)
    options = {"labels": np.zeros(len(tokens), int), "class_names": ["a"]}
    write_folder(tmp_path / "shards", tokens=tokens, samples_per_shard=SAMPLES, **options)
    dataset = ShardDataset(tmp_path / "shards", window_shards=2)
    begun, order = [], dataset.order(5)

    class Noted:
        num_samples = order.num_samples

        @staticmethod
        def dataset_index(positions):
            begun.append(int(positions[0]))
            return order.dataset_index(positions)

    monkeypatch.setattr(dataset, "order", lambda seed: Noted)
    monkeypatch.setattr(loader, "ThreadPoolExecutor", Reversed)
    monkeypatch.setattr(loader, "_SPARE", 4)
    sizes = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    with BatchLoader(dataset, seed=5, accumulation_steps=1, **sizes) as batches:
        for number in range(4 * SAMPLES):
            assert next(batches).sample_index.tolist() == [number]
    assert begun == sorted(begun)
