"""Runs started by `torchrun`, `deepspeed` and the environment of `srun` match one process.

`torchrun` starts new processes. For the other launchers, processes with the launcher's arguments
and environment are forked from a server that has imported everything.
"""

import gc
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from launched_runs import ROOT
from run_jobs import deterministic_metrics, train_run
from slurm import missing_programs
from two_hosts import unavailable_reason

from megavis.cli import main

pytestmark = pytest.mark.once

BIN = Path(sys.executable).parent


def start(words: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start a command with this environment first in PATH and one thread per process."""
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
    """Return an unused port in the range that SLURM job numbers map to."""
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
            # Terminate the launcher, which ends its workers in other process groups.
            process.terminate()
            process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]


def run_megavis(words: list[str], environment: dict[str, str]) -> None:
    """Run a process of `megavis`, as started by a launcher."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # keep the collector from scanning imported modules
    sys.exit(main(words))


def run_all(processes: list[tuple[list[str], dict[str, str]]]) -> None:
    """Run concurrent processes of `megavis` with these arguments and environments."""
    server = multiprocessing.get_context("forkserver")
    started = [server.Process(target=run_megavis, args=each) for each in processes]
    for process in started:
        process.start()
    try:
        # Those whose partner has failed would wait for it.
        while (left := [each for each in started if each.exitcode is None]) and not any(
            each.exitcode for each in started
        ):
            assert wait([each.sentinel for each in left], 1200), "none ends"
        assert [process.exitcode for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()


@pytest.fixture(scope="module")
def one_process(
    run_job: Callable[..., list[Any]], tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> list:
    output = tmp_path_factory.mktemp("alone")
    run_job(train_run, 1, str(tiny_config), [f"output={output}", "name=alone"])
    return deterministic_metrics(output / "alone")


def same_losses(folder: Path, reference: list) -> None:
    ours = deterministic_metrics(folder)
    assert [line["step"] for line in ours] == [line["step"] for line in reference]
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_torchrun(tiny_config: Path, tmp_path: Path, one_process: list) -> None:
    words = ["train", str(tiny_config), "--device", "cpu", f"output={tmp_path}", "name=two"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    finish(start([*torchrun, str(BIN / "megavis"), *words]))
    same_losses(tmp_path / "two", one_process)


# Writes the arguments and environment of its process to the script's folder.
STARTED = """\
import json, os, sys
with open(f"{os.path.dirname(__file__)}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""


def test_deepspeed(tiny_config: Path, tmp_path: Path, one_process: list) -> None:
    if not unavailable_reason():
        pytest.skip("test_two_hosts.py starts deepspeed here, over ssh")
    (tmp_path / "started.py").write_text(STARTED)
    words = ["train", str(tiny_config), "--device", "cpu", f"output={tmp_path}", "name=two"]
    deepspeed = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port())]
    finish(start([*deepspeed, str(tmp_path / "started.py"), *words]))
    run_all([json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)])
    same_losses(tmp_path / "two", one_process)


def start_deepspeed_script(folder: Path, tiny_config: Path) -> subprocess.Popen[str]:
    """Start `launch/deepspeed.sh` with a `python` in `folder` that writes how it was started."""
    folder.mkdir()
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{STARTED}")
    program.chmod(0o755)
    words = [str(tiny_config), "--device", "cpu", f"output={folder}", "name=two"]
    path = os.pathsep.join([str(folder), str(BIN), os.environ["PATH"]])
    script = str(ROOT / "launch" / "deepspeed.sh")
    return start(["bash", script, *words], PATH=path, PROCESSES="2")


def test_two_deepspeed_jobs_on_one_node(tiny_config: Path, tmp_path: Path) -> None:
    """DeepSpeed's own default is one port, which the second job would find in use."""
    folders = [tmp_path / name for name in ("first", "second")]
    launchers = [start_deepspeed_script(folder, tiny_config) for folder in folders]
    for launcher in launchers:
        finish(launcher)
    started = [
        json.loads((f / f"rank-{rank}.json").read_text()) for f in folders for rank in (0, 1)
    ]
    assert {tuple(words[:3]) for words, _ in started} == {("-m", "megavis.cli", "train")}
    run_all([(words[2:], environment) for words, environment in started])
    first, second = (deterministic_metrics(folder / "two") for folder in folders)
    assert first == second != []


def test_srun(tiny_config: Path, tmp_path: Path, one_process: list) -> None:
    """Two tasks with the environment variables of srun, on machines without SLURM."""
    if not missing_programs():
        pytest.skip("test_slurm.py starts a real srun here")
    words = ["train", str(tiny_config), "--device", "cpu", f"output={tmp_path}", "name=two"]
    slurm = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    slurm["SLURM_JOB_ID"] = str(free_port() - 20000)
    tasks = [{**slurm, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    run_all([(words, task) for task in tasks])
    same_losses(tmp_path / "two", one_process)


def test_config_error_exit_code(tiny_config: Path) -> None:
    words = [str(tiny_config), "--device", "cpu", "training.stepps=3"]
    process = start(["bash", str(ROOT / "launch/torchrun.sh"), *words], PROCESSES="2")
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 2, "torchrun alone would return 1"
    assert "training.stepps: unknown key; did you mean 'steps'?" in output
