"""`torchrun`, `deepspeed` and `srun`'s environment start the same run as one process alone."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launched_runs import ROOT
from run_jobs import deterministic_metrics
from slurm import missing_programs
from two_hosts import why_not

pytestmark = pytest.mark.once

BIN = Path(sys.executable).parent


def start(words: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start a command with this environment's programs first, one thread a process."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        words,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    """Return a port that nobody uses, among those that a SLURM job's number maps to."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def finish(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=1200)
    finally:
        if process.poll() is None:
            # A launcher that is asked to stop ends its workers, which are in other groups.
            process.terminate()
            process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]


@pytest.fixture(scope="module")
def one_process(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    output = tmp_path_factory.mktemp("alone")
    words = ["train", str(tiny_config), "--device", "cpu", f"output={output}", "name=alone"]
    finish(start([str(BIN / "megavis"), *words]))
    return deterministic_metrics(output / "alone")


def same_losses(folder: Path, reference: list) -> None:
    ours = deterministic_metrics(folder)
    assert [line["step"] for line in ours] == [line["step"] for line in reference]
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun", "--standalone", "--nproc-per-node", "2"],
        ["deepspeed", "--num_accelerators", "2", "--master_port", "PORT"],
    ],
    ids=["torchrun", "deepspeed"],
)
def test_launcher(
    launcher: list[str], tiny_config: Path, tmp_path: Path, one_process: list
) -> None:
    if launcher[0] == "deepspeed" and not why_not():
        pytest.skip("test_two_hosts.py starts deepspeed here, over ssh")
    words = ["train", str(tiny_config), "--device", "cpu", f"output={tmp_path}", "name=two"]
    launcher = [str(free_port()) if word == "PORT" else word for word in launcher]
    finish(start([*launcher, str(BIN / "megavis"), *words]))
    same_losses(tmp_path / "two", one_process)


def test_srun(tiny_config: Path, tmp_path: Path, one_process: list) -> None:
    """Two tasks with the variables that srun sets, where there is no SLURM to set them."""
    if not missing_programs():
        pytest.skip("test_slurm.py starts a real srun here")
    words = ["train", str(tiny_config), "--device", "cpu", f"output={tmp_path}", "name=two"]
    slurm = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    slurm["SLURM_JOB_ID"] = str(free_port() - 20000)
    tasks = [
        start([str(BIN / "megavis"), *words], SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **slurm)
        for i in range(2)
    ]
    for task in tasks:
        finish(task)
    same_losses(tmp_path / "two", one_process)


def test_a_typo_stops_all_processes_with_one_line_each(tiny_config: Path) -> None:
    words = [str(tiny_config), "--device", "cpu", "training.stepps=3"]
    process = start(["bash", str(ROOT / "launch/torchrun.sh"), *words], PROCESSES="2")
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 2, "torchrun's own would be 1"
    assert "training.stepps: unknown key; did you mean 'steps'?" in output
