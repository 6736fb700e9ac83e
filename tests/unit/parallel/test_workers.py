"""WorkerPool: results by rank, worker reuse, and failing workers."""

import gc
import os
import socket
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.parallel import workers
from megavis.parallel.launch import LISTENING
from megavis.parallel.workers import WorkerError, WorkerPool

pytestmark = pytest.mark.once


PRELOADED = ("megavis.training.trainer",)
"""As in tests/distributed: forks of a server that has imported this start immediately."""

LONGER_THAN_A_TEST_MAY_TAKE = 3600
"""Seconds; a test that waited for such a worker would exceed pytest's timeout."""


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


class MistakeError(UserError):
    """One that pickle cannot make again."""

    def __init__(self, number, text):
        super().__init__(text, key="data.train")


def make_a_mistake(launch):
    raise MistakeError(3, "is not there")


def return_unpicklable(launch):
    return lambda: launch


def name_parent(launch):
    return os.getppid()


def meet_at_the_socket(launch):
    if launch.rank == 0:
        other, _ = LISTENING[launch.master_port].accept()
        with other:
            return other.recv(5)
    with socket.create_connection((launch.master_address, launch.master_port)) as other:
        other.sendall(b"hello")
    return LISTENING


class Engine:
    """A cycle of references, as DeepSpeed's engines are."""

    living = weakref.WeakSet()

    def __init__(self):
        self.itself = self
        self.living.add(self)


def leave_engine(launch):
    gc.disable()  # it would run at any time, or never
    Engine()


def count_engines(launch):
    return len(Engine.living)


def count_threads(launch):
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_engines_end_with_their_job():
    """Each of its process groups has threads and sockets, which would slow down later jobs."""
    with WorkerPool(1, preload=PRELOADED) as pool:
        pool.run(leave_engine, 1)
        assert pool.run(count_engines, 1) == [0]


def test_results_are_ordered_by_rank_and_workers_are_reused():
    with WorkerPool(2) as pool:
        first = pool.run(describe, 2, "a", 1)
        second = pool.run(describe, 2)
        alone = pool.run(describe, 1)
        assert pool.run(count_threads, 2) == [(1, "1")] * 2
        with pytest.raises(WorkerError, match=r"rank 0 raised:\n(.*\n)*.*[Pp]ickle"):
            pool.run(return_unpicklable, 1)
    assert [r[:2] for r in first] == [(0, 2), (1, 2)]
    assert first[0][2] == first[1][2], "the workers must share one port"
    assert [r[4] for r in first] == [("a", 1)] * 2
    assert [r[3] for r in first] == [r[3] for r in second]
    assert alone[0][:2] == (0, 1)
    assert alone[0][3] == first[0][3]


def test_the_meeting_place_listens_before_the_job_begins():
    """A worker that connects first would wait half a second before it tries again."""
    with WorkerPool(2, preload=PRELOADED) as pool:
        for _ in range(2):
            assert pool.run(meet_at_the_socket, 2) == [b"hello", {}]


def test_preloaded_workers_fork_from_one_server_and_are_replaced():
    with WorkerPool(2, max_jobs=1, preload=PRELOADED) as pool:
        parents = {parent for _ in range(2) for parent in pool.run(name_parent, 2)}
        processes = {pool.run(describe, 1)[0][3] for _ in range(2)}
    assert len(parents) == 1
    assert parents != {os.getpid()}, "the server must be a separate process"
    assert len(processes) == 2, "a worker must be replaced after max_jobs"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (fail_on_rank_1, r"rank 1 raised:\n(.*\n)*ValueError: no luck"),
        (die_on_rank_1, "rank 1 died"),
    ],
)
def test_failing_worker_terminates_the_job(job, message):
    with WorkerPool(2, preload=PRELOADED) as pool:
        with pytest.raises(WorkerError, match=message):
            pool.run(job, 2)  # without waiting for rank 0
        assert not any(process.is_alive() for process in pool._processes)


def test_mistakes_are_passed_on():
    message = r"rank 0 raised:\n(.*\n)*.*data.train"
    with (
        WorkerPool(1, preload=PRELOADED) as pool,
        pytest.raises(WorkerError, match=message) as caught,
    ):
        pool.run(make_a_mistake, 1)
    assert caught.value.mistake.issues == (("data.train", "is not there"),)


def test_parity_without_shards_is_a_mistake(tiny_config, capsys):
    words = ["parity", str(tiny_config), "data.train=nowhere", "--processes", "1"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: command line: data.train: nowhere does not exist")
    assert len(error.splitlines()) == 1


def test_unresponsive_worker_is_reported(monkeypatch):
    def wait_for_one(pipes, timeout):
        # Start the timeout only after rank 1 has answered.
        return wait(pipes, timeout if len(pipes) == 1 else None)

    monkeypatch.setattr(workers, "wait", wait_for_one)
    with WorkerPool(2, preload=PRELOADED) as pool:
        with pytest.raises(WorkerError, match=r"ranks \[0\] did not answer in 1 s"):
            pool.run(sleep_on_rank_0, 2, timeout=1)
        assert not any(process.is_alive() for process in pool._processes)


def test_quiet_pools_discard_the_output_of_what_they_preload(tmp_path):
    """In a process of its own, since a process starts one fork server."""
    (tmp_path / "noisy.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    code = (
        "from megavis.parallel.workers import WorkerPool\n"
        "with WorkerPool(1, preload=('noisy',), quiet=True) as pool:\n"
        "    print(len(pool.run(repr, 1)))\n"
    )
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
