"""Processes in which tests change limits, modes, folders and signals.

In pytest's own process these would hold for the tests after them, and for its threads.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


@contextmanager
def open_child(folder: Path | str | None = None) -> Iterator[Run]:
    """Yield a function that calls module-level functions in one process, which then ends.

    Args:
        folder: the process's working directory; that of pytest by default.

    The process is a fork of multiprocessing's server, not of pytest, whose threads a fork would
    lack. It starts with the environment of the server. What a function returns or raises, the
    yielded one does.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        if folder is not None:
            pool.submit(os.chdir, folder).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def in_child(function: Run, *arguments: Any, folder: Path | str | None = None) -> Any:
    """Call a module-level function in a process of its own."""
    with open_child(folder) as run:
        return run(function, *arguments)
