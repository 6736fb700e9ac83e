"""Full disks, killed workers and killed commands: finished shards stay, others are reported."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import time

import pytest
from children import in_child
from image_files import tree
from kill_sweep import finished, killed_after, spawned, stop, workers_of, write_images

from data_tools.__main__ import main

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A command that writes twelve shards, and the files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("crashes")
    words = write_images(folder, count=96)
    assert main([*words, "--out", str(folder / "whole")]) == 0
    return words, tree(folder / "whole")


def test_kills_at_random_times(command, tmp_path):
    words, whole = command
    moments, kills = random.Random(0), 0
    for out in (tmp_path / "one", tmp_path / "two", tmp_path / "three"):
        codes, counts = [], [0]
        while not codes or codes[-1] != 0:
            seconds = moments.uniform(0.001, 0.02) if len(codes) < 30 else 60
            codes.append(killed_after([*words, "--out", str(out)], seconds))
            counts.append(finished(out))
        assert codes[:-1] == [-signal.SIGPROF] * (len(codes) - 1)
        assert counts == sorted(counts)
        assert tree(out) == whole
        kills += len(codes) - 1
    assert kills >= 3


def written_on_a_full_disk(words):
    """Run a command while files are limited to 8 KiB, less than a shard; return what it printed."""
    # An import would cut its compiled file short, which later imports cannot read.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, resource.RLIM_INFINITY))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(words)
    return code, printed.getvalue()


def report_of(out):
    return json.loads((out / "report.json").read_text())


@pytest.mark.parametrize("workers", ["0", "2"])
def test_full_disk(workers, command, tmp_path):
    words, whole = command
    out = tmp_path / "out"
    assert main([*words, "--out", str(out), "--slice", "1/2"]) == 0
    before = tree(out)
    words = [*words, "--out", str(out)]
    code, printed = in_child(written_on_a_full_disk, [*words, "--workers", workers])
    assert code == 1
    assert "not finished: File too large" in printed
    report = report_of(out)
    assert report["unfinished"]["reason"].startswith("File too large")
    (failed,) = report["unfinished"]["shards"]  # of several workers any may be the first
    assert failed in whole
    assert failed not in before
    assert report["finished"] == [f"shard-{number:06d}.tar" for number in range(0, 12, 2)]
    assert not list(out.glob(".*"))
    now = tree(out)
    assert {name: now[name] for name in before if name.startswith("shard")}.items() <= whole.items()
    assert main(words) == 0
    assert tree(out) == whole


def test_full_disk_without_a_report(command, tmp_path, monkeypatch, capsys):
    words, _ = command

    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("data_tools.shard_tasks.open_shard", full)
    monkeypatch.setattr("data_tools.job_report.write_json", full)
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "not finished: No space left on device: x; " in out
    assert "report.json cannot be written either: No space left on device" in out


def wait_until(condition, seconds=600):
    """Wait until a condition holds; the timeout allows for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_worker_and_parent(command, tmp_path):
    words, whole = command
    out = tmp_path / "out"
    full = [*words, "--out", str(out), "--workers", "2"]
    child = spawned(full)
    wait_until(lambda: finished(out) >= 1)
    stop(workers_of(child)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    report = report_of(out)
    assert report["unfinished"]["reason"] == "a worker process was killed (out of memory?)"
    left = [path.name for path in out.glob("*.tar") if path.with_suffix(".index.json").exists()]
    assert report["finished"] == sorted(left)
    assert set(report["unfinished"]["shards"]).isdisjoint(report["finished"])

    child = spawned(full)
    wait_until(lambda: len(workers_of(child)) == 2)
    workers = workers_of(child)
    stop(child)
    os.waitpid(child, 0)
    wait_until(lambda: not any(os.path.exists(f"/proc/{worker}/exe") for worker in workers))
    assert main([*words, "--out", str(out)]) == 0
    assert tree(out) == whole
