"""Prefetch in worker threads, preserving order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Ready in addition to reads in flight, so that one slow read does not stop the consumer.
_SPARE = 2


class Prefetcher(Generic[Item]):
    """Iterator over `read(first)`, `read(first + 1)`, ..., computed in threads.

    Decoders and numpy let go of Python's lock, so threads share the work of one process. Results
    come in order, whatever the number of threads. What a `read` raises is raised by the `next`
    that would have had its result, and ends the iteration. Memory holds `threads` + 2 results.

    Args:
        read: a function of the number alone; it must bear being called from several threads, and
            must not hold this object, or that would never be collected.
        first: number to begin with.
        end: number to stop before; None for no end.
        threads: how many read at once, 1 or more.
    """

    def __init__(
        self, read: Callable[[int], Item], *, first: int = 0, end: int | None = None, threads: int
    ) -> None:
        self._read, self._next, self._end = read, first, end
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
        self._pending: deque[Future[Item]] = deque()
        self._depth = threads + _SPARE
        self._closed = False
        # One that is dropped without close() must not leave its threads behind.
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        self._fill()
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            return self._pending.popleft().result()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """End the threads, when each is done with what it reads; may be called again."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _fill(self) -> None:
        while not self._closed and len(self._pending) < self._depth and self._next != self._end:
            self._pending.append(self._pool.submit(self._read, self._next))
            self._next += 1
