"""Fetch the shards of the window that is read, and of the next, while samples are being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from threading import Condition, Thread, get_ident

import numpy as np

from megavis.config.errors import UserError
from megavis.data.loading.order import Order, WindowedOrder

THREADS = 4
"""Concurrent fetches per process; the processes of a machine fetch different shards."""
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0


class ReadAhead:
    """Knows which window is read, and fetches its shards and the next one's in threads.

    They neither keep the process alive, nor report what fails: whoever reads such a shard fetches
    it again, and then reports it.

    Args:
        windows: the order in which samples are read.
        fetch: fetches a shard, given shards that must not make room for it; returns whether there
            was room.
        leave: called with the shards that are still needed, when others no longer are.
    """

    def __init__(
        self,
        windows: WindowedOrder,
        fetch: Callable[[int, Collection[int]], bool],
        leave: Callable[[Collection[int]], None],
    ) -> None:
        self._windows, self._fetch, self._leave = windows, fetch, leave
        self._changed = Condition()
        self._reading: dict[int, int] = {}
        self._newest = self._current = -1
        self._todo: deque[int] = deque()
        self._needed: frozenset[int] = frozenset()
        self._is_closed = False
        self._threads: list[Thread] = []

    def restart(self) -> None:
        """Expect any positions next: a run may go back to a checkpoint."""
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
        """Note that this thread has read them."""
        with self._changed:
            found = self._reading.pop(get_ident(), None)
        if found is not None:
            self._move()

    def close(self) -> None:
        """End the threads after what they are fetching. Can be called repeatedly."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _move(self) -> None:
        """Go on to the next window when no thread reads the one before any more."""
        with self._changed:
            current = min(self._reading.values(), default=self._newest)
            if current <= self._current or self._is_closed:
                return
            self._current = current
            shards = [*self._windows.shards_in(current), *self._windows.shards_in(current + 1)]
            self._needed = needed = frozenset(shards)
            self._todo = deque(dict.fromkeys(shards))
            self._changed.notify_all()
            if not self._threads:
                self._threads = [Thread(target=self._work, daemon=True) for _ in range(THREADS)]
                for thread in self._threads:
                    thread.start()
        self._leave(needed)

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._is_closed)
                if self._is_closed:
                    return
                todo, needed = self._todo, self._needed
                shard = todo.popleft()
            try:
                had_room = self._fetch(shard, needed)
            except (OSError, UserError):
                continue
            if had_room:
                pause = _FIRST_PAUSE
                continue
            # The shards of the window before are still open in some process.
            with self._changed:
                todo.appendleft(shard)
                self._changed.wait(pause)
            pause = min(2 * pause, _LAST_PAUSE)


class AnnouncedOrder:
    """An order that announces the samples that it is asked for."""

    def __init__(self, order: Order, ahead: ReadAhead) -> None:
        self._order, self._ahead = order, ahead
        self.num_samples = order.num_samples

    def dataset_index(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        self._ahead.begin(positions)
        return self._order.dataset_index(positions)
