"""Joining a job prints nothing of what other libraries lack, and compiles nothing."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.once

OPEN = """
import megavis
import deepspeed.ops
import torch.utils.cpp_extension

deepspeed.ops._probe_compatible_ops = None  # would fail if it were called
from megavis.parallel.context import open_context
from megavis.parallel.launch import read_launch

assert open_context(read_launch({}), device="cpu").world.size == 1
"""


def test_opening_a_context_is_quiet_and_probes_no_operator():
    done = subprocess.run([sys.executable, "-c", OPEN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "CUDA" not in shown
    assert "accelerator" not in shown
