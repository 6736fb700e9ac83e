"""A file that is truncated while it is mapped ends a command with a stack, not without a word."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

READ_TRUNCATED = """
import mmap, os

def read_sample(name):
    with open(name, "w+b") as file:
        file.write(bytes(8192))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
    os.truncate(name, 0)
    return mapped[5000]

if __name__ == "__main__":
"""
MEGAVIS = """
    from megavis.cli import main
    assert main(["schema", "--out", "schema.json"]) == 0
    read_sample("shard")
"""
DATA_TOOLS = """
    from data_tools.__main__ import main
    assert main(["palette", "grey", "--out", "grey.npy"]) == 0
    read_sample("shard")
"""
WORKER = """
    from data_tools.engines import process_map
    with process_map(1) as each:
        list(each(read_sample, ["shard"]))
"""


def shown_by(script, folder):
    """Return the exit code of a script, and what it writes to stderr."""
    (folder / "script.py").write_text(READ_TRUNCATED + script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", [MEGAVIS, DATA_TOOLS], ids=["megavis", "data_tools"])
def test_bus_error_shows_where(script, tmp_path):
    code, said = shown_by(script, tmp_path)
    assert code == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in said
    assert "in read_sample" in said


def test_bus_error_of_a_worker_shows_where(tmp_path):
    code, said = shown_by(WORKER, tmp_path)
    assert code == 1
    assert "Fatal Python error: Bus error" in said
    assert "in read_sample" in said
