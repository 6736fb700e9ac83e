"""`launch/elastic.py`: exit codes of torchrun's processes, and restarts of the whole job."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

pytestmark = pytest.mark.once
NODE = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "29500"]


@pytest.fixture
def elastic(monkeypatch):
    """The script as a module, with an environment of its own."""
    path = Path(__file__).parents[2] / "launch" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(os, "environ", {})
    return module


@pytest.fixture
def torchrun(elastic, monkeypatch):
    """Let torchrun's attempts end as listed; return the list, and the arguments of each."""
    ends, started = [], []

    def main(words):
        started.append((os.environ["MEGAVIS_RESTART_COUNT"], words))
        end = ends[len(started) - 1]
        if isinstance(end, BaseException):
            raise end
        if end:
            failure = SimpleNamespace(
                exitcode=end,
                timestamp=0,
                error_file_data={},
                local_rank=0,
                pid=1,
                error_file="",
                message="",
                signal_name=lambda: "",
                timestamp_isoformat=lambda: "",
            )
            raise ChildFailedError("train", {0: failure})

    monkeypatch.setattr(elastic, "main", main)
    return ends, started


def test_failed_job_starts_again_at_the_next_port(elastic, torchrun, capsys):
    ends, started = torchrun
    ends += [1, -9, 0]
    assert elastic.run(["--restarts", "3", *NODE, "train"]) == 0
    later = ["--rdzv-conf", "timeout=1800", *NODE[:-1]]
    assert started == [
        ("0", [*NODE, "train"]),
        ("1", [*later, "29501", "train"]),
        ("2", [*later, "29502", "train"]),
    ]
    errors = capsys.readouterr().err
    assert "elastic.py: exit code 1; starting the job again (1 of 3)\n" in errors
    assert "elastic.py: exit code 137; starting the job again (2 of 3)\n" in errors


@pytest.mark.parametrize("code", [2, 72, 75])
def test_mistakes_and_requested_stops_are_final(elastic, torchrun, code):
    ends, started = torchrun
    ends += [code]
    assert elastic.run(["--restarts", "3", "--standalone", "train"]) == code
    assert started == [("0", ["--standalone", "train"])]


def test_no_more_restarts_than_asked_for(elastic, torchrun):
    ends, started = torchrun
    ends += [1, 70]
    assert elastic.run(["--restarts", "1", "--standalone", "train"]) == 70
    assert [words for _, words in started] == [["--standalone", "train"]] * 2


def test_no_restarts_by_default(elastic, torchrun):
    ends, started = torchrun
    ends += [71]
    assert elastic.run(["--standalone", "train"]) == 71
    assert len(started) == 1


def test_signal_stops_the_job(elastic, torchrun):
    ends, started = torchrun
    ends += [1, SignalException("stopped", 15)]
    assert elastic.run(["--restarts", "3", "--standalone", "train"]) == 75
    assert len(started) == 2
