"""The cache of fetched files: whole or absent, bounded, and nothing in use is evicted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock, Thread

import numpy as np
import pytest

from megavis.data.loading import disk_cache
from megavis.data.loading.disk_cache import DiskCache, FullCacheError, Wanted, cached_files

pytestmark = pytest.mark.once
SIZE = 1_000


@pytest.fixture
def cache(tmp_path):
    """Room for three files."""
    (tmp_path / "data").mkdir()
    return DiskCache(tmp_path, 3 * SIZE)


def wanted(cache, name, *, size=SIZE, fill=None):
    content = name.encode()[:1] * size
    path = cache.folder / "data" / f"{name}.tar"
    return Wanted(path, size, fill or (lambda file: file.write(content)))


def hold(cache, name, *, spare="", size=SIZE):
    spared = {f"{each}.tar" for each in (name, *spare)}
    return cache.hold(wanted(cache, name, size=size), lambda: spared)


def names(cache):
    return {path.stem for path in cache.folder.glob("data/*.tar")}


def put(cache, name):
    cache.open(wanted(cache, name)).close()


def used_at(cache, name, seconds):
    os.utime(cache.folder / "data" / f"{name}.tar", (seconds, seconds))


def test_what_was_opened_longest_ago_is_evicted(cache):
    for second, name in enumerate("abc"):
        put(cache, name)
        used_at(cache, name, second)
    put(cache, "a")  # read again
    put(cache, "d")
    assert names(cache) == {"a", "c", "d"}
    hold(cache, "e", spare="c").close()
    assert "c" in names(cache)
    assert len(names(cache)) == 3


def test_open_and_mapped_files_stay(cache):
    opened = cache.open(wanted(cache, "a"))
    with cache.open(wanted(cache, "b")) as file:
        view = np.asarray(np.memmap(file, np.uint8, mode="r"))[:2]
    put(cache, "c")
    for name in "ac":
        used_at(cache, name, 1)
    used_at(cache, "b", 0)  # mapped alone, and opened longest ago
    put(cache, "d")
    assert names(cache) == {"a", "b", "d"}
    assert bytes(view) == b"bb"
    opened.close()
    put(cache, "e")
    assert names(cache) == {"b", "d", "e"}
    del view
    put(cache, "f")
    assert names(cache) == {"d", "e", "f"}


def test_what_is_held_stays_until_it_is_opened_or_given_up(cache):
    """Also what was there before it was held, and for another process."""
    other = DiskCache(cache.folder, cache.limit)
    put(cache, "a")
    held = {name: hold(cache, name) for name in "abc"}
    with pytest.raises(FullCacheError):
        hold(other, "d")
    opened = cache.open(wanted(cache, "a"))
    held["a"].close()
    with pytest.raises(FullCacheError):
        hold(other, "d")
    held["b"].close()
    hold(other, "d").close()
    assert names(cache) == {"a", "c", "d"}
    opened.close()
    held["c"].close()


@pytest.mark.parametrize("get", [lambda *of: DiskCache.open(*of), lambda *of: hold(of[0], "a")])
def test_nobody_can_evict_a_file_between_its_arrival_and_its_use(cache, monkeypatch, get):
    """Whenever the folder is released, others take all the room that they can get."""
    locked, evicted = DiskCache._locked, []

    @contextlib.contextmanager
    def greedy(self):
        with locked(self):
            yield
            for path in cache.folder.glob("data/*.tar") if len(evicted) < 3 else ():
                evicted.extend([path] * disk_cache._evict(path))

    monkeypatch.setattr(DiskCache, "_locked", greedy)
    with get(cache, wanted(cache, "a")) as file:
        assert file.read() == b"a" * SIZE
    assert not evicted


def test_what_is_not_needed_any_more_is_not_fetched(cache):
    """Its window was left while the cache was not free."""
    needed, waits, result = {"a.tar"}, Event(), []

    def names_needed():
        waits.set()
        return needed

    with cache._locked():
        job = Thread(target=lambda: result.append(cache.hold(wanted(cache, "a"), names_needed)))
        job.start()
        needed.clear()
    job.join(10)
    assert waits.is_set()
    assert result == [None]
    assert not names(cache)


def test_a_full_cache_is_said_after_a_while(cache, monkeypatch):
    monkeypatch.setattr(disk_cache, "WAIT_SECONDS", 0.15)
    files = [cache.open(wanted(cache, name)) for name in "abc"]
    text = r"is full: data\.cache_gib allows .* GiB, and d\.tar takes .* more"
    with pytest.raises(FullCacheError, match=text):
        cache.open(wanted(cache, "d"))
    assert names(cache) == {"a", "b", "c"}
    assert not list(cache.folder.glob("data/.*"))
    # Who waits for room closes what it has open itself.
    cache.open(wanted(cache, "d"), when_full=files.pop().close).close()
    assert names(cache) == {"a", "b", "d"}


def test_a_file_that_vanishes_does_not_hide_others(cache):
    """Its name is listed and it has no size any more, as when a person deletes it."""
    for number in range(20):
        (cache.folder / f"data/{number}.tar").symlink_to(cache.folder / "gone")
    put(cache, "a")
    assert [path.stem for path, _ in cached_files(cache.folder)] == ["a"]


def test_what_is_never_evicted_is_always_taken(cache):
    path = cache.folder / "data" / "samples.index"
    index = Wanted(path, 4 * SIZE, lambda file: file.write(bytes(4 * SIZE)))
    cache.open(index).close()
    with pytest.raises(FullCacheError):
        hold(cache, "a")
    assert path.exists()


def test_a_file_of_another_size_is_fetched_again(cache):
    """Left by a power failure, or by hand."""
    put(cache, "a")
    path = cache.folder / "data" / "a.tar"
    path.write_bytes(b"a")
    with cache.open(wanted(cache, "a")) as file:
        assert file.read() == b"a" * SIZE


def test_what_fails_leaves_nothing(cache):
    def fail(file):
        file.write(b"half")
        raise ConnectionError("cut")

    with pytest.raises(ConnectionError, match="cut"):
        cache.open(wanted(cache, "a", fill=fail))
    assert not list((cache.folder / "data").iterdir())
    put(cache, "a")


def test_leftovers_are_deleted_and_what_is_being_filled_is_not(cache):
    dead, alive = (cache.folder / "data" / f".{name}.tar.partial" for name in "ab")
    dead.write_bytes(bytes(2 * SIZE))
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        DiskCache(cache.folder, None)
        assert alive.exists()
    assert not dead.exists()


def test_room_is_kept_for_what_is_being_filled(cache):
    def fill(file):
        # Its size counts before its bytes are there.
        with pytest.raises(FullCacheError):
            hold(cache, "b", size=SIZE + 1)
        file.write(bytes(2 * SIZE))

    cache.open(wanted(cache, "a", size=2 * SIZE, fill=fill)).close()


def test_one_thread_at_a_time_fills_a_file(cache):
    """Also those that have waited for one that failed."""
    inside, most, filled, guard, start = 0, 0, 0, Lock(), Barrier(8)

    def fill(file):
        nonlocal inside, most, filled
        with guard:
            inside += 1
            filled += 1
            most, turn = max(most, inside), filled
        time.sleep(0.01)
        with guard:
            inside -= 1
        if turn < 4:
            raise ConnectionError
        file.write(b"x" * SIZE)

    def read(_):
        start.wait(10)
        while True:
            try:
                with cache.open(wanted(cache, "a", fill=fill)) as file:
                    return file.read()
            except ConnectionError:
                pass

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {b"x" * SIZE}
    assert (most, filled) == (1, 4)


def test_a_file_that_another_fills_is_not_waited_for_ahead(cache):
    path = cache.folder / "data" / ".a.tar.partial"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert hold(cache, "a") is None
    assert not names(cache)


def test_threads_that_evict_each_others_files_read_them_whole(cache):
    """Five files in room for three: what is opened may be evicted at the same moment."""

    def read(seed):
        for turn in np.random.default_rng(seed).integers(0, 5, 40).tolist():
            name = "abcde"[turn]
            with cache.open(wanted(cache, name)) as file:
                assert file.read() == name.encode() * SIZE
                assert sum(stat.st_size for _, stat in sizes()) <= 3 * SIZE

    def sizes():
        with cache._locked():
            return list(cached_files(cache.folder))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
