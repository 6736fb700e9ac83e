"""Limit of restarts without progress, signals, and interruption of validation."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megavis import cli
from megavis.config.errors import GIVEN_UP_EXIT_CODE, GivenUpError
from megavis.data.loading.dataset import ShardDataset
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch
from megavis.training.callbacks.callback import StepState
from megavis.training.callbacks.validation import Validate
from megavis.training.faults.interruption import Signals, count_restart, is_automatic
from megavis.training.provenance import record_start


@pytest.fixture
def context():
    yield open_context(read_launch({}), device="cpu")
    close_context()


def test_the_first_ctrl_c_lets_training_save_and_the_second_interrupts(capfd):
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received
        assert "again to stop at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert signals.received


def test_ctrl_c_is_received_where_it_cannot_be_answered(monkeypatch):
    """A log on a full disk ends no run: not one that is about to save either."""

    def full(*words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Signals() as signals:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            signal.raise_signal(signal.SIGINT)
        assert signals.received


def test_the_first_start_of_a_run_is_no_restart(context, tmp_path, monkeypatch):
    """A job that SLURM has queued again starts the next run of a sweep, or one it had not begun."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    record_start(tmp_path, 0)
    count_restart(tmp_path, 0, 0, context)
    record_start(tmp_path, 0)
    with pytest.raises(GivenUpError, match="restarted 0 times"):
        count_restart(tmp_path, 0, 0, context)


def test_restarts_without_progress_are_limited(context, tmp_path, monkeypatch):
    def start(step):
        count_restart(tmp_path, step, 2, context)

    for _ in range(5):  # manual starts are not limited
        start(100)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start(100)
    start(100)
    start(200)  # a new checkpoint resets the count
    start(200)
    with pytest.raises(
        GivenUpError, match=r"restarted 2 times .* since step 200 \(training.max_re"
    ):
        start(200)
    start(200)  # a manual start after the error may try again
    start(200)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    start(200)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start(200)  # a manual start resets the count too
    start(200)


def test_no_restart_without_progress_may_be_allowed(context, tmp_path, monkeypatch):
    count_restart(tmp_path, 0, 0, context)  # by hand
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for _ in range(2):
        with pytest.raises(GivenUpError, match="restarted 0 times .* since step 0"):
            count_restart(tmp_path, 0, 0, context)


def test_the_launcher_is_told_that_a_start_is_counted(context, tmp_path, monkeypatch):
    told = tmp_path / "counted"
    monkeypatch.setenv("MEGAVIS_COUNTED", str(told))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    count_restart(tmp_path, 100, 1, context)
    assert told.exists()
    told.unlink()
    with pytest.raises(GivenUpError, match="restarted 1 times"):
        count_restart(tmp_path, 100, 1, context)
    assert not told.exists()
    monkeypatch.setenv("MEGAVIS_COUNTED", str(tmp_path / "away" / "counted"))
    count_restart(tmp_path, 200, 1, context)


def test_a_job_without_progress_has_its_own_exit_code(small_config, monkeypatch, capsys):
    """Launchers try a mistake again in a job that has run before, but not this."""

    def run(args):
        raise GivenUpError("restarted 2 times", key="training.max_restarts")

    monkeypatch.setattr(cli, "_import_work", lambda _: run)
    assert cli.main(["train", str(small_config)]) == GIVEN_UP_EXIT_CODE
    assert "training.max_restarts: restarted 2 times" in capsys.readouterr().err


def test_the_exit_code_is_kept_where_the_message_cannot_be_written(
    small_config, monkeypatch, capfd
):
    def run(args):
        raise GivenUpError("restarted 2 times", key="training.max_restarts")

    monkeypatch.setattr(cli, "_import_work", lambda _: run)
    with Path("/dev/full").open("w", buffering=1) as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert cli.main(["train", str(small_config)]) == GIVEN_UP_EXIT_CODE
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            log.close()


PROCESS = """
import contextlib, sys
from megavis import cli

def main():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            print("step 1", file=stream, flush=True)
    return int(sys.argv[1])

cli.main = main
cli.run_process()
"""


@pytest.mark.parametrize("code", [0, 75])
def test_a_process_ends_with_its_code_where_its_log_is_full(code):
    """Python's own is 120 if it cannot write the rest of the log: launchers would try again."""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as log:
        words = [sys.executable, "-c", PROCESS, str(code)]
        assert subprocess.run(words, stdout=log, stderr=log, env=buffered).returncode == code


@pytest.mark.parametrize(
    "left", [b"", b'{"step": 100, "rest', b"\xff\x00", b"[]", b'{"step": 100}']
)
def test_record_cut_by_a_power_failure_counts_as_absent(context, tmp_path, monkeypatch, left):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / "restarts.json").write_bytes(left)
    count_restart(tmp_path, 100, 1, context)
    with pytest.raises(GivenUpError, match="restarted 1 times"):
        count_restart(tmp_path, 100, 1, context)


@pytest.mark.parametrize(
    ("environment", "automatic"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"MEGAVIS_RESTART_COUNT": "0"}, False),
        ({"MEGAVIS_RESTART_COUNT": ""}, False),
        ({"MEGAVIS_RESTART_COUNT": "1"}, True),
    ],
)
def test_automatic_restarts_are_detected(environment, automatic):
    assert is_automatic(environment) == automatic


def test_urgent_stop_interrupts_validation(context, shards):
    answers = []

    def is_urgent():
        answers.append(True)
        return True

    engine = SimpleNamespace(
        layers=None, context=context, micro_batch_size=2, evaluated=nullcontext
    )
    state = StepState(4, 8, None, engine)
    Validate(ShardDataset(shards / "validation"), 4, 16, is_urgent=is_urgent)(state)
    assert (state.record, answers) == ({}, [True])
