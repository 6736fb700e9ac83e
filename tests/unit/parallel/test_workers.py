"""The pool of local processes: results by rank, and what a failing worker looks like."""

import os
import time
from multiprocessing.connection import wait

import pytest

from megavis.parallel import workers
from megavis.parallel.workers import WorkerError, WorkerPool

pytestmark = pytest.mark.once


PRELOADED = ("megavis.training.trainer",)
"""As in tests/distributed: forks start at once where a server has imported this already."""

LONGER_THAN_A_TEST_MAY_TAKE = 3600
"""Seconds: pytest ends a test that waits for such a worker, on a busy machine too."""


def describe(launch, *words):
    return launch.rank, launch.world_size, launch.master_port, os.getpid(), words


def fail_on_rank_1(launch):
    if launch.rank == 1:
        raise ValueError("no luck")
    time.sleep(LONGER_THAN_A_TEST_MAY_TAKE)


def die_on_rank_1(launch):
    if launch.rank == 1:
        os._exit(3)
    time.sleep(LONGER_THAN_A_TEST_MAY_TAKE)


def sleep_on_rank_0(launch):
    if launch.rank == 0:
        time.sleep(LONGER_THAN_A_TEST_MAY_TAKE)


def give_what_cannot_travel(launch):
    return lambda: launch


def name_parent(launch):
    return os.getppid()


def count_threads(launch):
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_results_come_by_rank_from_processes_that_stay_alive():
    with WorkerPool(2) as pool:
        first = pool.run(describe, 2, "a", 1)
        second = pool.run(describe, 2)
        alone = pool.run(describe, 1)
        assert pool.run(count_threads, 2) == [(1, "1")] * 2
        with pytest.raises(WorkerError, match=r"rank 0 raised:\n(.*\n)*.*[Pp]ickle"):
            pool.run(give_what_cannot_travel, 1)
    assert [r[:2] for r in first] == [(0, 2), (1, 2)]
    assert first[0][2] == first[1][2], "the workers meet at one port"
    assert [r[4] for r in first] == [("a", 1)] * 2
    assert [r[3] for r in first] == [r[3] for r in second]
    assert alone[0][:2] == (0, 1)
    assert alone[0][3] == first[0][3]


def test_preloaded_workers_are_forks_of_one_server_and_are_replaced():
    with WorkerPool(2, max_jobs=1, preload=PRELOADED) as pool:
        parents = {parent for _ in range(2) for parent in pool.run(name_parent, 2)}
        processes = {pool.run(describe, 1)[0][3] for _ in range(2)}
    assert len(parents) == 1
    assert parents != {os.getpid()}, "the server is a process of its own"
    assert len(processes) == 2, "a worker serves so many jobs and no more"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (fail_on_rank_1, r"rank 1 raised:\n(.*\n)*ValueError: no luck"),
        (die_on_rank_1, "rank 1 died"),
    ],
)
def test_one_failing_worker_ends_the_job_of_all(job, message):
    with WorkerPool(2, preload=PRELOADED) as pool:
        with pytest.raises(WorkerError, match=message):
            pool.run(job, 2)  # without waiting for rank 0
        assert not any(process.is_alive() for process in pool._processes)


def test_a_worker_that_does_not_answer_is_named(monkeypatch):
    def wait_for_one(pipes, timeout):
        # The clock runs from the answer of rank 1 on, however long that takes.
        return wait(pipes, timeout if len(pipes) == 1 else None)

    monkeypatch.setattr(workers, "wait", wait_for_one)
    with WorkerPool(2, preload=PRELOADED) as pool:
        with pytest.raises(WorkerError, match=r"ranks \[0\] did not answer in 1 s"):
            pool.run(sleep_on_rank_0, 2, timeout=1)
        assert not any(process.is_alive() for process in pool._processes)
