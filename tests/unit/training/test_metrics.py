"""`metrics.jsonl` of an interrupted run equals that of an uninterrupted one."""

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
from children import in_child

from megavis.cli import main
from megavis.training.metrics import MetricsWriter, read_metrics

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def trained(small_config, tmp_path_factory):
    """Return the config and folder of a four-step run, validated and saved every two steps."""
    root = tmp_path_factory.mktemp("metrics")
    path = root / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
output: {root}
training: {{steps: 4, log_every: 1, validate_every: 2, validation_images: 8}}
checkpoint: {{every: 2}}
"""
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return path, root / "small"


def losses(run):
    """Return a run's metrics without throughput."""
    kept = ("step", "loss", "validation_loss", "lr", "grad_norm", "samples_seen")
    return [{k: line[k] for k in kept if k in line} for line in read_metrics(run)]


@pytest.mark.parametrize("step", [2, 4])
def test_interrupted_validation_is_repeated_on_resume(trained, tmp_path, step):
    """A signal may end a run after saving a step, including the last, but before validation."""
    config, run = trained
    shutil.copytree(run, tmp_path / "small")
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    assert lines[-1].pop("validation_loss")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "small" / "metrics.jsonl").write_text(text)
    (tmp_path / "small" / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
    assert main(["train", str(config), "--device", "cpu", f"output={tmp_path}"]) == 0
    assert losses(tmp_path / "small") == losses(run)


def test_restart_from_scratch_writes_each_step_once(trained, tmp_path):
    config, run = trained
    shutil.copytree(run, tmp_path / "small")
    shutil.rmtree(tmp_path / "small" / "checkpoints")
    assert main(["train", str(config), "--device", "cpu", f"output={tmp_path}"]) == 0
    assert losses(tmp_path / "small") == losses(run)


def test_copied_run_with_a_cut_line_and_a_deleted_checkpoint_goes_on(trained, tmp_path):
    """`latest` names the deleted checkpoint; a kill has cut the last line of the metrics."""
    config, run = trained
    copy = tmp_path / "small"
    shutil.copytree(run, copy)
    assert (copy / "checkpoints" / "latest").read_text().strip() == "step-00000004"
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    lines = (run / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(lines[:-20])
    assert main(["train", str(config), "--device", "cpu", f"output={tmp_path}"]) == 0
    assert losses(copy) == losses(run)
    assert [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def largest_file(num_bytes):
    """Simulate a full disk in a child process: no file grows beyond a size."""
    # An import would cut its compiled file short, which later imports cannot read.
    sys.dont_write_bytecode = True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_on_a_full_disk(folder, limit, steps):
    """Write a line, others while files are limited, amend one of these, and write a last one.

    Returns:
        The steps in the file while it was limited, and what was printed.
    """
    writer = MetricsWriter(folder, first_step=0)
    writer.write(1, {"loss": 1.0})
    with contextlib.redirect_stderr(io.StringIO()) as printed, largest_file(limit):
        for step in range(2, steps):
            writer.write(step, {"loss": 1.0, "accuracy": 0.5, "samples_seen": 8.0 * step})
        written = [line["step"] for line in read_metrics(folder)]
    writer.amend(steps - 1, {"validation_loss": 3.0})
    writer.write(steps, {"loss": 1.0})
    writer.close()
    return written, printed.getvalue()


@pytest.mark.parametrize(("limit", "steps"), [(30, 4), (30, 501), (10_000, 501)])
def test_no_line_is_lost_on_a_full_disk(tmp_path, limit, steps):
    """More lines than fit into any buffer; the last one that fits is cut in the middle."""
    written, printed = in_child(write_on_a_full_disk, tmp_path, limit, steps)
    assert written == list(range(1, len(written) + 1))
    assert len(written) == 1 if limit == 30 else 50 < len(written) < 500
    assert printed.count("WARNING") == 1
    assert "WARNING: metrics are not written: [Errno 27]" in printed
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["step"] for line in lines if "validation_loss" in line] == [steps - 1]


def test_a_repeated_validation_waits_for_a_full_disk(tmp_path, monkeypatch, capsys):
    """A resumed run must not end for a line that it can write later."""
    path, flush = tmp_path / "metrics.jsonl", os.fsync
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    writer = MetricsWriter(tmp_path, first_step=2, logging=())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    writer.amend(2, {"validation_loss": 4.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    writer.amend(2, {"validation_accuracy": 0.5})
    monkeypatch.setattr(os, "fsync", flush)
    assert "WARNING: metrics are not written: [Errno 28]" in capsys.readouterr().err
    writer.write(3, {"loss": 3.0})
    writer.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0, "validation_loss": 4.0, "validation_accuracy": 0.5},
        {"step": 3, "loss": 3.0},
    ]


def test_a_run_whose_metrics_were_left_behind_can_be_validated_again(tmp_path):
    """A run folder may be copied with its checkpoints alone."""
    writer = MetricsWriter(tmp_path, first_step=2, logging=())
    writer.amend(2, {"validation_loss": 4.0})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 2, "validation_loss": 4.0}]


def test_log_on_a_full_disk_does_not_end_a_run(trained, tmp_path, monkeypatch):
    config, run = trained
    with Path("/dev/full").open("w", buffering=1) as log:
        monkeypatch.setattr(sys, "stderr", log)
        with pytest.raises(OSError, match="No space left"):
            print("step 1", file=sys.stderr)
        assert main(["train", str(config), "--device", "cpu", f"output={tmp_path}"]) == 0
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            log.close()
    assert losses(tmp_path / "small") == losses(run)


def test_file_that_was_replaced_is_continued(tmp_path):
    """As an editor does, or a copy from another host; on NFS the open one would be stale."""
    writer = MetricsWriter(tmp_path, first_step=0, logging=())
    writer.write(1, {"loss": 1.0})
    shutil.copy(tmp_path / "metrics.jsonl", tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / "metrics.jsonl")
    writer.write(2, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("")
    writer.write(3, {"loss": 3.0})
    assert read_metrics(tmp_path) == [{"step": 3, "loss": 3.0}]
    writer.amend(3, {"validation_loss": 4.0})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 3, "loss": 3.0, "validation_loss": 4.0}]


def test_failed_run_shows_its_last_metrics(trained, tmp_path, monkeypatch):
    """Dashboards write from threads, which a process that goes on would otherwise keep."""
    closed, close = [], MetricsWriter.close

    def note(writer):
        closed.append(writer)
        close(writer)

    monkeypatch.setattr(MetricsWriter, "close", note)
    words = [f"output={tmp_path}", "training.max_bad_steps=1", "optimizer.learning_rate=1e30"]
    assert main(["train", str(trained[0]), "--device", "cpu", *words]) != 0
    assert len(closed) == 1
