"""What a command imports says nothing, and what held before holds after it."""

import gc
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megavis.commands.quiet import quietly


def fail_aloud():
    with quietly():
        print("what a library says")
        warnings.warn("what it warns of", stacklevel=1)
        logging.getLogger("library").warning("what it logs")
        logging.getLogger("library").error("what it fails in")
        assert not gc.isenabled()
        raise ImportError("passes")


@pytest.mark.once
def test_nothing_is_said_and_no_garbage_collected_inside(capsys, caplog):
    with pytest.raises(ImportError, match="passes"):
        fail_aloud()
    assert gc.isenabled()
    assert capsys.readouterr().out == ""
    assert [record.message for record in caplog.records] == ["what it fails in"]
    logging.getLogger("library").warning("what it logs afterwards")
    assert caplog.records[-1].message == "what it logs afterwards"


COMMANDS = [["params", "CONFIG"], ["plan", "CONFIG", "--gpus", "8"], ["schema"]]


@pytest.mark.once
def test_commands_write_nothing_but_their_own_to_standard_error(tmp_path):
    """A toolkit without a GPU, of which torch logs, is what CUDA_HOME says."""
    config = Path(__file__).parents[2] / "yaml_configs" / "igpt" / "s_32.yaml"
    code = (
        "import sys; from megavis.cli import main;"
        f" sys.exit(max(main([w if w != 'CONFIG' else {str(config)!r} for w in words])"
        f" for words in {COMMANDS!r}))"
    )
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.once
def test_training_and_evaluation_write_nothing_of_libraries(small_config, tmp_path):
    """Whatever is imported or called first, warnings of libraries do not reach a user."""
    words = [str(small_config), f"output={tmp_path}", "--device", "cpu"]
    run = str(tmp_path / "small")
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    for command in (["train", *words], ["likelihood", run, "--device", "cpu"]):
        done = subprocess.run(
            [sys.executable, "-m", "megavis.cli", *command],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
        assert lines == []
