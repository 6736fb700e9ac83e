"""`python -m benchmarks.gpu_check --device cpu`: every stage at tiny sizes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import in_child

from benchmarks.gpu_check import driver
from benchmarks.gpu_check.__main__ import main
from megavis.parallel.workers import WorkerPool

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def run_stages(words):
    """Run all stages, with processes forked from a server that has imported everything."""
    driver.WorkerPool = functools.partial(WorkerPool, preload=("megavis.training.trainer",))
    return main(words)


def test_all_stages_run_on_cpu(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert in_child(run_stages, words, folder=tmp_path) == 0
    stages = json.loads((tmp_path / "report.json").read_text())
    assert [stage["stage"] for stage in stages] == list(range(1, 11))
    assert all(stage["finished"] and stage["small"] for stage in stages)
    rows = {
        row["what"]: row for s in stages for part in s["parts"].values() for row in part["rows"]
    }
    assert all(row["passed"] is not False for row in rows.values())
    # Rows for GPUs only have a note instead of a value.
    for what in ("GVP-B, ZeRO-1: MFU", "igpt/demo.yaml: forward and backward wait for the device"):
        assert rows[what]["value"] is None
        assert "GPU" in rows[what]["note"]
    report = (tmp_path / "report.md").read_text()
    assert "| SDPA: causal, bfloat16 | flash_attention_for_cpu |" in report
    assert report.count("\n## ") == 10
    # A second call measures nothing.
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("finished earlier") == 10
