"""The memory maps of a data set's shards, of which a bounded number is open at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

import numpy as np


class ShardMaps:
    """Maps shards when they are read first, and keeps those that were read last; thread-safe.

    Threads that read different shards open them at the same time, and those that read the same one
    wait for the first of them. A map that was passed over is closed when its last user drops it, so
    a thread that drops each map before it asks for the next holds one at most.

    Args:
        release: called with a shard whose map is no longer kept.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._maps: OrderedDict[int, Future[np.ndarray]] = OrderedDict()
        self._lock = Lock()

    def get(self, shard: int, open_map: Callable[[int], np.ndarray], *, most: int) -> np.ndarray:
        """Return a shard as uint8 `[num_bytes]`, and keep at most `most` of them open.

        Raises what `open_map` raises, which is called if it is not open.
        """
        passed_over: list[int] = []
        with self._lock:
            found = self._maps.get(shard)
            is_new = found is None
            if found is None:
                found = self._maps[shard] = Future()
            self._maps.move_to_end(shard)
            while len(self._maps) > most:
                passed_over.append(self._maps.popitem(last=False)[0])
        for other in passed_over:
            self._release(other)
        if is_new:
            self._open(shard, open_map, found)
        return found.result()

    def _open(
        self, shard: int, open_map: Callable[[int], np.ndarray], found: Future[np.ndarray]
    ) -> None:
        try:
            found.set_result(open_map(shard))
        except BaseException as error:
            found.set_exception(error)
            with self._lock:
                if self._maps.get(shard) is found:  # the next reader tries again
                    del self._maps[shard]
