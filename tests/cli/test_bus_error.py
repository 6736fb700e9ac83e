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
from megavis.cli import main

assert main(["schema", "--out", "schema.json"]) == 0
with open("shard", "w+b") as file:
    file.write(bytes(8192))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0)
os.truncate("shard", 0)

def read_sample():
    return mapped[5000]

read_sample()
"""


def test_bus_error_shows_where(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", READ_TRUNCATED]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "in read_sample" in done.stderr
