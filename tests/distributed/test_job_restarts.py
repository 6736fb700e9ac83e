"""Two nodes, one of which fails long before the other, restart together."""

import os
import subprocess
import sys

import pytest
from launched_runs import ROOT
from test_launchers import free_port

pytestmark = pytest.mark.once


def test_nodes_restart_together():
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def node(rank):
        where = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        where += ["--master-addr", "127.0.0.1", "--master-port", port]
        words = [str(ROOT / "launch/elastic.py"), "--restarts", "2", *where]
        worker = str(ROOT / "tests/support/two_attempts.py")
        return subprocess.Popen(
            [sys.executable, *words, worker], env=environment, stderr=subprocess.PIPE, text=True
        )

    nodes = [node(0), node(1)]
    try:
        errors = [each.communicate(timeout=600)[1] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
            each.wait()
    assert [each.returncode for each in nodes] == [0, 0], errors
    for text in errors:
        assert "exit code 3; starting the job again (1 of 2)" in text
