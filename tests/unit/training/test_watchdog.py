"""The watchdog's question for silent ranks, in a job of a thousand simulated ones."""

import json
import multiprocessing
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megavis.training.faults import watchdog
from megavis.training.faults.watchdog import Watchdog

SIZE = 1024
DEAD, ABSENT = 700, 901


class CountingStore:
    """A connection to a store that counts its requests and lets all living ranks send heartbeats.

    Rank `DEAD` sends no further one, and rank `ABSENT` has never sent one.
    """

    def __init__(self, port):
        self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
        self.requests = self.beats = 0

    def send(self, ranks):
        self.beats += 1
        word = json.dumps({"host": "gpu-087", "doing": "step 9", "time": self.beats})
        for rank in ranks:
            self.store.set(f"megavis/alive/{rank}", word)

    def set(self, key, value):
        self.send(set(range(SIZE)) - {DEAD, ABSENT})

    def check(self, keys):
        self.requests += 1
        return self.store.check(keys)

    def multi_get(self, keys):
        self.requests += 1
        return self.store.multi_get(keys)

    def get(self, key):
        self.requests += 1
        return self.store.get(key)


@pytest.fixture
def ask(monkeypatch):
    """Let a rank report, and return its number of requests."""
    monkeypatch.setattr(watchdog, "_BEAT_SECONDS", 0.01)
    monkeypatch.setenv("MASTER_ADDR", "gpu-000")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask(rank):
        context = SimpleNamespace(world=SimpleNamespace(rank=rank, size=SIZE))
        watching = Watchdog(context, patience=1)
        watching._store = store = CountingStore(server.port)
        store.send(set(range(SIZE)) - {ABSENT})
        watching._report_silent_ranks()
        return store.requests

    return ask


def test_few_requests_find_the_silent_ranks_of_a_large_job(ask, capfd):
    # Two for all keys, and a search of ten halvings for the one that is missing, twice.
    assert ask(0) <= 2 * (2 + 2 * 10)
    assert capfd.readouterr().err == (
        "megavis: rank 700 on gpu-087 does not answer: it is dead or hangs; last heard of in step"
        " 9\nmegavis: rank 901 on an unknown host does not answer: it is dead or hangs; last heard"
        " of in start\n"
    )
    assert ask(1) > 0
    assert capfd.readouterr().err == "", "the first live rank has reported"


def test_few_ranks_of_a_large_job_ask(ask, capfd):
    asking = [rank for rank in range(SIZE) if watchdog._asks(rank, SIZE)]
    assert asking == [0, 1, 2, 3, 256, 512, 768, 1023]
    assert ask(700) == ask(1000) == 0
    assert capfd.readouterr().err == ""
    for size in range(1, 7):
        assert all(watchdog._asks(rank, size) for rank in range(size))


def end(folder):
    """End this process as the watchdog does."""
    context = SimpleNamespace(world=SimpleNamespace(rank=5, size=SIZE))
    watchdog._LINGER_BEATS = 0
    Watchdog(context, patience=2, stacks=folder)._end()


@pytest.mark.parametrize("run", ["run", "unmounted"])
def test_stacks_are_in_the_log_only_if_they_cannot_be_written(tmp_path, capfd, run):
    (tmp_path / "run").mkdir()
    folder = tmp_path / run / "stacks"
    process = multiprocessing.get_context("spawn").Process(target=end, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == watchdog.HUNG_EXIT_CODE
    log = capfd.readouterr().err
    if run == "run":
        # Rank 5 leaves the message to the few ranks that report.
        assert log == ""
        assert "in _end" in (folder / "rank-5.txt").read_text()
    else:
        assert " has waited for 2 s or more in starting; its stacks:\n" in log
        assert "in _end" in log
        assert not folder.parent.exists()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_of_nccl_are_written_for_torchfrtrace(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    watchdog._write_collectives(tmp_path, 5)
    written = [path.name for path in tmp_path.iterdir()]
    assert written == (["collectives_rank_5"] if backend == "nccl" else [])
    for name in written:
        # `torchfrtrace FOLDER -p collectives_rank_` reads these.
        trace = pickle.loads((tmp_path / name).read_bytes())
        assert {"version", "pg_config", "entries"} <= set(trace)
