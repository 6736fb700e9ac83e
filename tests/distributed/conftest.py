"""Worker processes shared by all distributed tests, since importing torch takes ten seconds.

They are forked from one server that has imported everything.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from launched_runs import long_words

from megavis.parallel.workers import WorkerPool

HANGS_AFTER = 1200.0
"""Timeout of a job in seconds: generous for a busy machine, below pytest's own timeout."""

PRELOADED = ("megavis.training.trainer",)

multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
# Under xdist the server imports while the worker imports the tests. Starting it here lets pytest
# capture the output of its processes. Otherwise the first job starts it.
if "PYTEST_XDIST_WORKER" in os.environ:
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def run_job() -> Iterator[Callable[..., list[Any]]]:
    """Run a job on the first N of four workers; a failure replaces the pool."""
    pools: list[WorkerPool] = []

    def run(job: Callable[..., Any], num_processes: int, *args: Any) -> list[Any]:
        if not pools:
            pools.append(WorkerPool(4, preload=PRELOADED))
        try:
            return pools[0].run(job, num_processes, *args, timeout=HANGS_AFTER)
        except BaseException:
            pools.pop().close()
            raise

    yield run
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def long_run(
    run_job: Callable[..., list[Any]], tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an uninterrupted run of `long_words` on two processes."""
    from run_jobs import train_run

    folder = tmp_path_factory.mktemp("long")
    run_job(train_run, 2, str(tiny_config), long_words(folder, "unbroken"))
    return folder / "unbroken"
