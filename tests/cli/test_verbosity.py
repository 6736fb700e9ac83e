"""`quietly` suppresses the output of imports and restores all state."""

import gc
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megavis.commands.terminal import quietly


def fail_with_output():
    with quietly():
        print("output of a library")
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("library").warning("a log record")
        logging.getLogger("library").error("an error")
        assert not gc.isenabled()
        raise ImportError("passes")


@pytest.mark.once
def test_quietly_suppresses_output_and_gc(capsys, caplog):
    with pytest.raises(ImportError, match="passes"):
        fail_with_output()
    assert gc.isenabled()
    assert capsys.readouterr().out == ""
    assert [record.message for record in caplog.records] == ["an error"]
    logging.getLogger("library").warning("a later record")
    assert caplog.records[-1].message == "a later record"


@pytest.mark.once
def test_commands_leave_stderr_empty(train_small, tmp_path):
    """CUDA_HOME without a GPU, which torch logs, is set too.

    tests/unit/test_house.py covers `train` and `schema`.
    """
    preset = str(Path(__file__).parents[2] / "yaml_configs" / "igpt" / "s_32.yaml")
    run = train_small(tmp_path)
    # Evaluation comes first: it imports most, and only first imports warn.
    commands = [
        ["likelihood", str(run), "--device", "cpu"],
        ["params", preset],
        ["plan", preset, "--gpus", "8"],
    ]
    code = (
        "import sys; from megavis.cli import main;"
        f" sys.exit(max(main(words) for words in {commands!r}))"
    )
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_start_of_training_says_the_device_once(train_small, tmp_path, capfd, monkeypatch):
    run = train_small(tmp_path)
    assert capfd.readouterr().err.count(f"{run}: on cpu, 1 process\n") == 1
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as --quiet does
    train_small(tmp_path)
    assert "on cpu" not in capfd.readouterr().err
