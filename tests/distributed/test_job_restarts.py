"""Two nodes, one of which fails long before the other, restart together."""

import os
import subprocess
import sys

import pytest
from launched_runs import ROOT
from test_launchers import free_port

pytestmark = pytest.mark.once


def test_nodes_restart_together(tmp_path):
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def node(rank):
        where = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        where += ["--master-addr", "127.0.0.1", "--master-port", port]
        words = [str(ROOT / "launch/elastic.py"), "--restarts", "2", *where]
        worker = str(ROOT / "tests/support/two_attempts.py")
        with (tmp_path / f"node-{rank}.log").open("w") as log:
            return subprocess.Popen([sys.executable, *words, worker], env=environment, stderr=log)

    nodes = [node(0), node(1)]
    try:
        codes = [each.wait(timeout=600) for each in nodes]
    finally:
        for each in nodes:
            each.kill()
            each.wait()
    said = [(tmp_path / f"node-{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], said
    for text in said:
        assert "exit code 3; starting the job again (1 of 2)" in text
