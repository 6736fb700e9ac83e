"""`launch/slurm.sh` and `sweep.sh` in a real SLURM: requeuing of unfinished jobs."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched_runs import ENVIRONMENT, ROOT, long_words
from run_jobs import deterministic_metrics
from slurm import PATH, Slurm, missing_programs

from megavis.training.metrics import read_metrics

pytestmark = [pytest.mark.once, pytest.mark.cluster]

TWO_TASKS = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")

# Stub of megavis. It exits with codes by array index, "first task,second task;…" for each attempt.
# `slow 2`: a second later than the other. `asked 75`: on SLURM's warning.
PYTHON = """\
#!/bin/bash
declare -A codes=({codes})
IFS=';' read -ra turns <<<"${{codes[$SLURM_ARRAY_TASK_ID]}}"
IFS=',' read -ra tasks <<<"${{turns[${{SLURM_RESTART_COUNT:-0}}]}}"
code=${{tasks[$SLURM_PROCID]}}
echo "turn ${{SLURM_RESTART_COUNT:-0}} task $SLURM_PROCID: $*"
case $code in
  slow*) sleep 1 ;;
  asked*)
    trap 'exit 75' USR1
    while true; do sleep 0.1; done
    ;;
esac
exit "${{code#slow }}"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A real SLURM on this machine."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"no SLURM: {', '.join(missing)} (Debian: slurmd slurmctld slurm-client munge)")
    with Slurm() as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder to call sbatch in, for its logs."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    return tmp_path


def test_array_tasks_are_requeued_individually(slurm: Slurm, checkout: Path) -> None:
    codes = {0: "2,slow 2", 1: "asked 75,asked 75;0,0", 2: "75,slow 75;0,0"}
    python = checkout / "bin" / "python"
    python.parent.mkdir()
    listed = " ".join(f"[{index}]='{code}'" for index, code in codes.items())
    python.write_text(PYTHON.format(codes=listed))
    python.chmod(0o755)

    words = ("--array=0-2", *TWO_TASKS, "launch/sweep.sh", "a.yaml", "--grid", "a.b=1,2,3")
    job = slurm.submit(checkout, *words, PATH=f"{python.parent}:{PATH}")
    logs = [checkout / f"megavis-sweep-{job}-{index}.log" for index in codes]
    wait_until(lambda: logs[1].exists() and logs[1].read_text().count("turn 0 task") == 2)
    # SLURM sends this signal near the time limit, by `--signal=B:USR1@300`.
    slurm.ask("scancel", "--batch", "--signal=USR1", f"{job}_1")

    assert slurm.wait_for(job) == {"0": "FAILED", "1": "COMPLETED", "2": "COMPLETED"}
    texts = [log.read_text() for log in logs]
    assert [len(re.findall(r"turn \d task 0", text)) for text in texts] == [1, 2, 2], texts
    assert "time is nearly up" in texts[1]
    assert f"queueing job {job}_2 again" in texts[2]
    assert "megavis.cli sweep a.yaml --grid a.b=1,2,3 --index 2" in texts[2]
    assert not list(checkout.glob(".slurm-*"))


def test_job_does_not_start_on_a_faulty_node_again(slurm: Slurm, checkout: Path) -> None:
    """SLURM changes only jobs that wait, such as one that was just queued again."""
    programs = checkout / "bin"
    programs.mkdir()
    for name, body in (
        ("python", 'echo $SLURMD_NODENAME >"$MEGAVIS_FAULTY_NODES"; exit 71'),
        ("sinfo", "echo 2"),  # This SLURM has one node.
    ):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    words = (*TWO_TASKS, "--job-name=faulty", "launch/slurm.sh", "a.yaml")
    job = slurm.submit(checkout, *words, PATH=f"{programs}:{PATH}")

    log = checkout / f"faulty-{job}.log"
    wait_until(lambda: log.exists() and "will not start on localhost again" in log.read_text())
    wait_until(lambda: "JobState=PENDING" in slurm.ask("scontrol", "show", "job", job))
    # Longer than a requeued job waits: this one has no node to start on.
    time.sleep(8)
    shown = slurm.ask("scontrol", "show", "job", job)
    slurm.ask("scancel", job)
    assert "JobState=PENDING" in shown
    assert "ExcNodeList=localhost" in shown
    assert f"queueing job {job} again" in log.read_text()


def test_cancelled_job_stays_cancelled(slurm: Slurm, checkout: Path) -> None:
    python = checkout / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/bash\ntrap 'exit 75' TERM USR1\necho up\nwhile true; do sleep 0.1; done\n"
    )
    python.chmod(0o755)
    words = ("launch/slurm.sh", "a.yaml")
    job = slurm.submit(checkout, *TWO_TASKS, *words, PATH=f"{python.parent}:{PATH}")
    log = checkout / f"megavis-{job}.log"
    wait_until(lambda: log.exists() and log.read_text().count("up") == 2)
    slurm.ask("scancel", str(job))
    assert slurm.wait_for(job) == {"": "CANCELLED"}, log.read_text()
    assert "not queued again" in log.read_text()


def test_preempted_run_resumes_exactly(
    slurm: Slurm, checkout: Path, tiny_config: Path, long_run: Path
) -> None:
    run = checkout / "run"
    words = (str(tiny_config), "--device", "cpu", *long_words(checkout, "run"))
    job = slurm.submit(checkout, *TWO_TASKS, "launch/slurm.sh", *words, **ENVIRONMENT)
    log = checkout / f"megavis-{job}.log"

    wait_until(lambda: [line["step"] for line in read_metrics(run)][3:], log)
    urgent = slurm.submit(checkout, "--partition=urgent", "--exclusive", "--wrap=true")
    slurm.wait_for(urgent)

    assert slurm.wait_for(job) == {"": "COMPLETED"}, log.read_text()
    assert log.read_text().count("stopped by a signal") == 2, log.read_text()
    assert log.read_text().count(f"exit code 75; queueing job {job} again") == 1
    assert deterministic_metrics(run) == deterministic_metrics(long_run)


def wait_until(is_true: Callable[[], object], log: Path | None = None) -> None:
    end = time.monotonic() + 240
    while not is_true():
        text = log.read_text() if log and log.exists() else "no log"
        assert time.monotonic() < end, f"timed out:\n{text}"
        time.sleep(0.1)
