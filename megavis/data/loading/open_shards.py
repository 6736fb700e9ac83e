"""The open shards of a data set, of which a bounded number is open at once."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from io import FileIO
from threading import Lock
from typing import Protocol

import numpy as np


class Content(Protocol):
    """The bytes of an open shard: a memory map, or a file."""

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return the bytes `[start, stop)`, uint8 `[stop - start]`."""


class ShardFile:
    """A shard that is read without a map, so that read bytes hold neither the file nor its pages.

    The file is closed when this object is dropped.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def __getitem__(self, span: slice) -> np.ndarray:
        """Read bytes `[start, stop)`. Raises OSError, also if the file has become shorter."""
        count = span.stop - span.start
        content = os.pread(self._file.fileno(), count, span.start)
        if len(content) < count:
            name = str(self._file.name)
            raise OSError(errno.EIO, "File is shorter than when it was opened", name)
        return np.frombuffer(content, np.uint8)

    def __del__(self) -> None:
        self._file.close()


class OpenShards:
    """Opens shards on first use, and keeps the most recently used ones open; thread-safe.

    Threads that read different shards open them concurrently; threads that read the same shard wait
    for the first of them. A shard that is no longer kept is closed when its last user drops it, so
    a thread that drops each shard before asking for the next holds at most one.

    Args:
        release: called with each shard that is no longer kept.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._kept: OrderedDict[int, Future[Content]] = OrderedDict()
        self._lock = Lock()

    def get(self, shard: int, open_one: Callable[[int], Content], *, most: int) -> Content:
        """Return a shard, and keep at most `most` of them open.

        `open_one` is called if the shard is not open; its exceptions are raised.
        """
        passed_over: list[int] = []
        with self._lock:
            found = self._kept.get(shard)
            is_new = found is None
            if found is None:
                found = self._kept[shard] = Future()
            self._kept.move_to_end(shard)
            while len(self._kept) > most:
                passed_over.append(self._kept.popitem(last=False)[0])
        for other in passed_over:
            self._release(other)
        if is_new:
            self._open(shard, open_one, found)
        return found.result()

    def keep_only(self, shards: Collection[int]) -> None:
        """Close all other shards that are not in use."""
        with self._lock:
            others = [
                shard
                for shard, content in self._kept.items()
                if shard not in shards and content.done()
            ]
            for shard in others:
                del self._kept[shard]
        for shard in others:
            self._release(shard)

    def _open(self, shard: int, open_one: Callable[[int], Content], found: Future[Content]) -> None:
        try:
            found.set_result(open_one(shard))
        except BaseException as error:
            found.set_exception(error)
            with self._lock:
                if self._kept.get(shard) is found:  # the next reader tries again
                    del self._kept[shard]
