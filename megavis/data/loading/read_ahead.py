"""Fetch the shards of the current window and of the next while samples are being read.

A fetched shard is held until it is opened or given up: otherwise the cache could evict it, for this
process or another, before it has been read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from threading import Condition, Thread, get_ident
from typing import Protocol

import numpy as np

from megavis.config.errors import UserError
from megavis.data.loading.disk_cache import FullCacheError
from megavis.data.loading.order import Order, WindowedOrder

THREADS = 4
"""Concurrent fetches per process; the processes of a machine fetch different shards."""
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0

Needed = Callable[[], Collection[int]]


class Held(Protocol):
    """A fetched shard, which is not evicted until this object is closed."""

    def close(self) -> None: ...  # noqa: D102 - see above


class ReadAhead:
    """Tracks the current window, and fetches its shards and the next window's in threads.

    These threads neither keep the process alive nor report failures: the reader of such a shard
    fetches it again, and then reports the failure. A window is left when no thread reads it and a
    later one has begun, so threads must begin in the order of their positions (`InTurn`).

    Args:
        windows: the order in which samples are read.
        hold: fetches a shard and holds it; returns None if another process fetches it, or if it is
            no longer among the needed shards. Must not evict needed shards. Raises FullCacheError.
        leave: called with the shards that are still needed when others no longer are.
        most: largest number of shards held at once.
    """

    def __init__(
        self,
        windows: WindowedOrder,
        hold: Callable[[int, Needed], Held | None],
        leave: Callable[[Collection[int]], None],
        *,
        most: int,
    ) -> None:
        self._windows, self._hold, self._leave, self._most = windows, hold, leave, most
        self._changed = Condition()
        self._reading: dict[int, int] = {}
        self._newest = self._current = -1
        self._todo: deque[int] = deque()
        self._read_now: frozenset[int] = frozenset()
        self._needed: frozenset[int] = frozenset()
        self._held: dict[int, Held] = {}
        self._is_closed = False
        self._threads: list[Thread] = []

    def restart(self) -> None:
        """Accept any positions next, since a run may go back to a checkpoint."""
        with self._changed:
            self._newest = self._current = -1

    def begin(self, positions: np.ndarray) -> None:
        """Note that this thread is about to read the samples at these positions."""
        if np.size(positions):
            oldest, newest = (
                self._windows.window_at(int(each))
                for each in (np.min(positions), np.max(positions))
            )
            with self._changed:
                self._reading[get_ident()] = oldest
                self._newest = max(self._newest, newest)
                self._move()

    def end(self) -> None:
        """Note that this thread has finished reading."""
        with self._changed:
            if self._reading.pop(get_ident(), None) is not None:
                self._move()

    def opened(self, shard: int) -> None:
        """Note that a reader has opened this shard, which it keeps itself from now on."""
        with self._changed:
            self._give_up({shard})

    def make_way(self) -> Collection[int]:
        """Give up held shards to make room for one that a reader needs.

        Gives up the next window's shards first; if there are none, all. Returns the shards that
        other readers should keep.
        """
        with self._changed:
            kept = self._read_now
            if kept.issuperset(self._held):
                kept = frozenset()
            self._give_up(self._held.keys() - kept)
            return kept

    def close(self) -> None:
        """Stop the threads after their current fetches. Can be called repeatedly."""
        with self._changed:
            self._is_closed = True
            self._give_up(set(self._held))
            self._changed.notify_all()

    def _give_up(self, shards: Collection[int]) -> None:
        for shard in shards:
            if (held := self._held.pop(shard, None)) is not None:
                held.close()

    def _move(self) -> None:
        """Move on to the next window once no thread reads the previous one."""
        current = min(self._reading.values(), default=self._newest)
        if current <= self._current or self._is_closed:
            return
        self._current = current
        self._read_now = frozenset(self._windows.shards_in(current))
        shards = [*self._windows.shards_in(current), *self._windows.shards_in(current + 1)]
        self._needed = needed = frozenset(shards)
        # Release them before others are fetched in their place.
        self._give_up(self._held.keys() - needed)
        self._leave(needed)
        self._todo = deque(dict.fromkeys(shards))
        self._changed.notify_all()
        if not self._threads:
            self._threads = [Thread(target=self._work, daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._is_closed)
                if self._is_closed:
                    return
                todo = self._todo
                shard = todo.popleft()
            try:
                # The window may be left before the cache has room for this shard.
                held = self._hold(shard, lambda: self._needed)
            except FullCacheError:
                # Shards of the previous window are still open in some process.
                with self._changed:
                    todo.appendleft(shard)
                    self._changed.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            except (OSError, UserError):
                pass
            else:
                pause = _FIRST_PAUSE
                self._keep(shard, held)

    def _keep(self, shard: int, held: Held | None) -> None:
        if held is None:
            return
        with self._changed:
            is_wanted = shard in self._needed and shard not in self._held and not self._is_closed
            if is_wanted and len(self._held) < self._most:
                self._held[shard] = held
                return
        held.close()


class AnnouncedOrder:
    """An order that announces the requested samples to `ReadAhead`."""

    def __init__(self, order: Order, ahead: ReadAhead) -> None:
        self._order, self._ahead = order, ahead
        self.num_samples = order.num_samples

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        self._ahead.begin(positions)
        return self._order.dataset_index(positions)
