"""Launch scripts: the commands that they start, recorded by stub programs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
PATIENCE = 300
"""Seconds after which a script counts as hung, even on a busy machine."""


@pytest.fixture
def programs(tmp_path):
    """Return a function that writes a stub program, which logs its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, body=""):
        path = folder / name
        path.write_text(f'#!/bin/bash\nprintf "%s " {name} "$@" >> {tmp_path}/log\n{body}\n')
        path.chmod(0o755)

    write("nvidia-smi", "echo GPU 0; echo GPU 1; echo GPU 2")
    # Not logged: it changes nothing.
    (folder / "squeue").write_text("#!/bin/bash\necho RUNNING\n")
    (folder / "squeue").chmod(0o755)
    return write


@pytest.fixture
def start(tmp_path):
    """Start a script with stubs first on the PATH and without scheduler variables."""
    (tmp_path / "launch").symlink_to(LAUNCH)

    def run(script, *words, log=subprocess.PIPE, **variables):
        scheduler = ("SLURM", "MASTER", "CUDA_VISIBLE", "TORCHINDUCTOR")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(scheduler)}
        environment = {**inherited, **variables}
        environment["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", LAUNCH / script, *words],
            env=environment,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    return run


def logged(tmp_path, program):
    return (tmp_path / "log").read_text().partition(f"{program} ")[2].strip()


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh", "slurm.sh", "sweep.sh"])
def test_script_without_arguments_prints_usage(start, script):
    process = start(script)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert f"launch/{script} CONFIG" in output


def test_torchrun_starts_one_process_per_gpu(start, programs, tmp_path):
    programs("python")
    assert start("torchrun.sh", "a.yaml", "training.steps=3").wait(PATIENCE) == 0
    assert logged(tmp_path, "python") == (
        f"{LAUNCH}/elastic.py --restarts 0 --standalone --nproc-per-node 3"
        " --module megavis.cli train a.yaml training.steps=3"
    )


@pytest.mark.parametrize(
    ("visible", "processes"), [("0,2", 2), ("1", 1), ("GPU-a,MIG-b", 2), ("0,-1,2", 1), ("", 1)]
)
def test_torchrun_respects_cuda_visible_devices(start, programs, tmp_path, visible, processes):
    programs("python")
    assert start("torchrun.sh", "a.yaml", CUDA_VISIBLE_DEVICES=visible).wait(PATIENCE) == 0
    assert f"--nproc-per-node {processes} " in logged(tmp_path, "python")


def test_torchrun_on_several_nodes_uses_node_0_as_master(start, programs, tmp_path):
    programs("python")
    where = {"NUM_NODES": "09", "NODE_RANK": "08", "MASTER_ADDR": "node00", "PROCESSES": "8"}
    where["RESTARTS"] = "5"
    assert start("torchrun.sh", "a.yaml", **where).wait(PATIENCE) == 0
    assert logged(tmp_path, "python") == (
        f"{LAUNCH}/elastic.py --restarts 5 --nnodes 9 --node-rank 08 --master-addr node00"
        " --master-port 29500 --nproc-per-node 8 --module megavis.cli train a.yaml"
    )


def test_user_chooses_the_number_of_compiling_processes(start, programs, tmp_path):
    programs("python", f"echo $TORCHINDUCTOR_COMPILE_THREADS > {tmp_path}/threads")
    assert start("torchrun.sh", "a.yaml").wait(PATIENCE) == 0
    assert (tmp_path / "threads").read_text() == "4\n"
    assert start("torchrun.sh", "a.yaml", TORCHINDUCTOR_COMPILE_THREADS="9").wait(PATIENCE) == 0
    assert (tmp_path / "threads").read_text() == "9\n"


@pytest.mark.once
def test_torchrun_lets_processes_save_on_sigterm(tmp_path):
    worker = tmp_path / "worker"
    body = f"trap 'sleep 0.2; touch {tmp_path}/saved; exit 75' TERM; touch {tmp_path}/ready"
    worker.write_text(f"#!/bin/bash\n{body}\nwhile true; do sleep 0.1; done\n")
    worker.chmod(0o755)
    words = ["--standalone", "--nproc-per-node", "1", "--no-python", str(worker)]
    process = subprocess.Popen([sys.executable, LAUNCH / "elastic.py", *words])
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(PATIENCE) == 75
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "NODE_RANK is missing: set it to the index of this node, from 0"),
        ({"NODE_RANK": "0"}, "MASTER_ADDR is missing: set it to the name of node 0"),
        ({"NODE_RANK": "4", "MASTER_ADDR": "a"}, "NODE_RANK is 4, and nodes are 0 to 3"),
        ({"NUM_NODES": "four"}, "NUM_NODES is four: set it to a whole number"),
        ({"NUM_NODES": "0"}, "NUM_NODES is 0: set it to a whole number"),
        ({"NUM_NODES": "1", "PROCESSES": "two"}, "PROCESSES is two: set it to a whole number"),
        ({"NUM_NODES": "1", "MASTER_PORT": "-1"}, "MASTER_PORT is -1: set it to a whole number"),
        ({"NUM_NODES": "1", "RESTARTS": "yes"}, "RESTARTS is yes: set it to a whole number"),
    ],
)
def test_torchrun_refuses_variables_as_mistakes(start, programs, variables, sentence):
    programs("python")
    process = start("torchrun.sh", "a.yaml", **{"NUM_NODES": "4", **variables})
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (2, f"torchrun.sh: {sentence}\n")


@pytest.mark.parametrize(
    ("printed", "processes"),
    [
        ("GPU 0: H100 (UUID: a)\\n  MIG 3g.40gb Device 0: (UUID: b)\\nGPU 1: H100 (UUID: c)", 2),
        ("NVIDIA-SMI has failed because it could not communicate with\\n\\nthe driver", 1),
    ],
)
def test_torchrun_counts_gpus_and_no_other_lines(start, programs, tmp_path, printed, processes):
    programs("python")
    programs("nvidia-smi", f"printf '{printed}\n'")
    assert start("torchrun.sh", "a.yaml").wait(PATIENCE) == 0
    assert f"--nproc-per-node {processes} " in logged(tmp_path, "python")


@pytest.mark.parametrize("script", ["slurm.sh", "sweep.sh"])
def test_slurm_scripts_need_a_job_and_a_checkout(start, tmp_path, script):
    (tmp_path / "elsewhere").mkdir()
    outside, no_checkout = (
        start(script, "a.yaml", SLURM_ARRAY_TASK_ID="0", **more)
        for more in ({}, {"SLURM_SUBMIT_DIR": str(tmp_path / "elsewhere")})
    )
    assert outside.communicate(timeout=PATIENCE)[1].endswith("; start it with sbatch\n")
    assert no_checkout.communicate(timeout=PATIENCE)[1].endswith("; call sbatch in one\n")
    assert (outside.returncode, no_checkout.returncode) == (2, 2)


def test_deepspeed_with_and_without_hostfile(start, programs, tmp_path):
    programs("deepspeed")
    port = {"MASTER_PORT": "29501", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/mine_"}
    assert start("deepspeed.sh", "a.yaml", PROCESSES="2", **port).wait(PATIENCE) == 0
    assert logged(tmp_path, "deepspeed") == (
        "--num_accelerators 2 --master_port 29501 --no_local_rank --no_python env OMP_NUM_THREADS=1"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCH_FR_BUFFER_SIZE=2000"
        " TORCH_FR_DUMP_TEMP_FILE=/tmp/mine_ TORCH_NCCL_DUMP_ON_TIMEOUT=1"
        f" TORCHINDUCTOR_COMPILE_THREADS=4 {shutil.which('python')} -m megavis.cli train a.yaml"
    )
    (tmp_path / "log").unlink()
    hosts = LAUNCH / "hostfile.example"
    assert start("deepspeed.sh", "a.yaml", HOSTFILE=str(hosts), **port).wait(PATIENCE) == 0
    assert logged(tmp_path, "deepspeed").startswith(f"--hostfile {hosts} --master_port 29501 --no_")
    assert start("deepspeed.sh", "a.yaml", HOSTFILE="absent").wait(PATIENCE) == 2


@pytest.mark.parametrize(
    ("visible", "processes", "included"),
    [
        ("2,3", "2", "2,3"),
        ("2,3", "", "2,3"),
        ("4, 6,7", "2", "4,6"),
        ("5,-1,2", "", "5"),  # CUDA stops at the first that is invalid
    ],
)
def test_deepspeed_takes_the_visible_gpus(start, programs, tmp_path, visible, processes, included):
    programs("deepspeed")
    where = {"CUDA_VISIBLE_DEVICES": visible, "PROCESSES": processes, "MASTER_PORT": "1"}
    assert start("deepspeed.sh", "a.yaml", **where).wait(PATIENCE) == 0
    assert logged(tmp_path, "deepspeed").startswith(
        f"--include localhost:{included} --master_port 1 --no_local_rank"
    )


@pytest.mark.parametrize(
    ("visible", "processes", "sentence"),
    [
        ("2,3", "3", "PROCESSES is 3, and CUDA_VISIBLE_DEVICES names 2 GPUs: 2,3"),
        ("GPU-a,GPU-b", "2", "names GPU-a, and DeepSpeed's launcher takes numbers of GPUs; use"),
        ("0,1", "two", "PROCESSES is two: set it to a whole number"),
    ],
)
def test_deepspeed_refuses_gpus_that_it_cannot_take(
    start, programs, tmp_path, visible, processes, sentence
):
    programs("deepspeed")
    script = start("deepspeed.sh", "a.yaml", CUDA_VISIBLE_DEVICES=visible, PROCESSES=processes)
    _, errors = script.communicate(timeout=PATIENCE)
    assert script.returncode == 2
    assert errors.startswith("deepspeed.sh: ")
    assert sentence in errors
    assert not (tmp_path / "log").exists()


# Like DeepSpeed's on one node: its launcher handles no signal, and the process that it starts ends
# the two that train when one of them has failed.
DEEPSPEED = r"""
cat > node <<'NODE'
trap 'echo node >> ended; kill $(jobs -p); exit 1' TERM INT
for rank in 0 1; do bash worker $rank & done
wait -n; code=$?
wait
exit $code
NODE
cat > worker <<'WORKER'
for name in TERM USR1; do trap "echo $1 $name >> received; exit 75" $name; done
touch ready-$1
while :; do sleep 0.1; done
WORKER
bash node -m deepspeed.launcher.launch &
wait $!
"""


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_deepspeed_passes_signals_on_and_waits(start, programs, tmp_path, name):
    programs("deepspeed", DEEPSPEED)
    with (tmp_path / "stderr").open("w") as log:
        script = start("deepspeed.sh", "a.yaml", PROCESSES="2", log=log)
    end = time.monotonic() + PATIENCE
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end
        time.sleep(0.05)
    script.send_signal(getattr(signal, f"SIG{name}"))
    assert script.wait(PATIENCE) == 75
    lines = sorted((tmp_path / "received").read_text().splitlines())
    assert lines == [f"0 {name}", f"1 {name}"], "each is told once"
    assert not (tmp_path / "ended").exists()


def test_deepspeed_on_several_nodes_leaves_signals_to_its_launcher(start, programs, tmp_path):
    programs("deepspeed", "trap 'exit 3' TERM; touch ready; while :; do sleep 0.1; done")
    script = start("deepspeed.sh", "a.yaml", PROCESSES="2")
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(PATIENCE) == 3


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_deepspeed_without_visible_gpus_starts_processes_on_the_cpu(
    start, programs, tmp_path, hidden
):
    programs("deepspeed")
    words = {"CUDA_VISIBLE_DEVICES": hidden, "PROCESSES": "2"}
    assert start("deepspeed.sh", "a.yaml", **words).wait(PATIENCE) == 0
    assert logged(tmp_path, "deepspeed").startswith("--num_accelerators 2 ")


def test_two_jobs_of_deepspeed_on_one_node_meet_at_different_free_ports(start, programs, tmp_path):
    programs("deepspeed")
    ports = set()
    for _ in range(3):
        assert start("deepspeed.sh", "a.yaml", PROCESSES="1").wait(PATIENCE) == 0
        words = logged(tmp_path, "deepspeed").split()
        ports.add(int(words[words.index("--master_port") + 1]))
        (tmp_path / "log").unlink()
    # Of three draws from 12,768 at least two differ, but once in 10^8 times.
    assert len(ports) > 1
    assert all(20000 <= port < 32768 for port in ports)


def test_two_jobs_on_one_node_record_collectives_in_different_files(start, programs, tmp_path):
    programs("python", f'echo "$TORCH_FR_DUMP_TEMP_FILE" >> {tmp_path}/files')
    for _ in range(2):
        assert start("torchrun.sh", "a.yaml", PROCESSES="1").wait(PATIENCE) == 0
    first, second = (tmp_path / "files").read_text().split()
    assert first != second
    assert {name.rstrip("0123456789") for name in (first[:-6], second[:-6])} == {
        "/tmp/megavis_collectives_"
    }


def test_torchrun_on_one_node_meets_at_the_port_that_is_asked_for(start, programs, tmp_path):
    programs("python")
    assert start("torchrun.sh", "a.yaml", MASTER_PORT="29501").wait(PATIENCE) == 0
    assert logged(tmp_path, "python").startswith(
        f"{LAUNCH}/elastic.py --restarts 0 --master-addr 127.0.0.1 --master-port 29501"
    )


STEP = "--wait=60 --kill-on-bad-exit=0 --export=ALL"


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (2, False), (72, False), (1, True), (75, True)]
)
def test_slurm_starts_srun_and_requeues(start, programs, tmp_path, code, again):
    programs("srun", f"exit {code}")
    programs("scontrol")
    assert start("slurm.sh", "a.yaml", "name=b", SLURM_JOB_ID="5").wait(PATIENCE) == code
    srun, _, scontrol = logged(tmp_path, "srun").partition(" scontrol ")
    assert srun == f"{STEP} env python -m megavis.cli train a.yaml name=b"
    assert scontrol == ("requeue 5" if again else "")


@pytest.mark.parametrize(
    ("faulty", "spare", "before", "after"),
    [
        ("b\na\n", 1, "(null)", None),
        ("b\na\n", 2, "(null)", "a,b"),
        ("b\n", 1, "c[1-2],d", "c[1-2],d,b"),
        ("", 2, "(null)", None),
    ],
)
def test_slurm_keeps_the_job_from_faulty_nodes(
    start, programs, tmp_path, faulty, spare, before, after
):
    """Replicas disagree on named nodes; where no others are free, the job would wait for ever."""
    programs("srun", f'printf "{faulty}" >"$MEGAVIS_FAULTY_NODES"; exit 71')
    programs("sinfo", f"echo 4; echo {spare}")
    programs("scontrol", f'[[ $1 != show ]] || echo "   ReqNodeList=(null) ExcNodeList={before}"')
    script = start("slurm.sh", "a.yaml", SLURM_JOB_ID="5", SLURM_JOB_NUM_NODES="4")
    _, errors = script.communicate(timeout=PATIENCE)
    assert script.returncode == 71
    log = (tmp_path / "log").read_text()
    assert log.index("scontrol requeue 5") < (log + "scontrol update").index("scontrol update")
    excluded = re.search(r"update JobId=5 ExcNodeList=(\S+)", log)
    assert (excluded and excluded[1]) == after
    known = "job 5 will not start on" if after else "may start"
    assert known in errors
    assert not (tmp_path / ".slurm-5.faulty").exists()


def test_slurm_stops_requeuing_after_repeated_early_failures(start, programs, tmp_path):
    programs("srun", "exit 1")
    programs("scontrol")
    script = start("slurm.sh", "a.yaml", SLURM_JOB_ID="5")
    assert script.wait(PATIENCE) == 1
    # A run that saved and stopped resets the count of failures.
    programs("srun", "exit 75")
    assert start("slurm.sh", "a.yaml", SLURM_JOB_ID="5").wait(PATIENCE) == 75
    programs("srun", "exit 1")
    for _ in range(4):
        script = start("slurm.sh", "a.yaml", SLURM_JOB_ID="5")
        _, errors = script.communicate(timeout=PATIENCE)
    assert "failed four times in a row; not queued again" in errors
    assert (tmp_path / "log").read_text().count("scontrol requeue 5") == 5
    assert not list(tmp_path.glob(".slurm-*"))


def test_slurm_leaves_the_count_to_a_run_that_counts_its_restarts(start, programs, tmp_path):
    """It may have a new checkpoint each time: nodes may fail every quarter of an hour."""
    programs("srun", 'touch "$MEGAVIS_COUNTED"; exit 1')
    programs("scontrol")
    for _ in range(5):
        assert start("slurm.sh", "a.yaml", SLURM_JOB_ID="5").wait(PATIENCE) == 1
    assert (tmp_path / "log").read_text().count("scontrol requeue 5") == 5
    assert not list(tmp_path.glob(".slurm-*"))


def test_slurm_requeues_a_job_that_still_saves_at_its_time_limit(start, programs, tmp_path):
    """SLURM would end it without queueing it again."""
    asked = tmp_path / "asked"
    programs("squeue", "date --date '60 seconds' +%FT%T")
    programs("sleep")
    programs("scancel", f"touch {asked}")
    programs("scontrol")
    programs("srun", f"until grep -q requeue {tmp_path}/log; do /bin/sleep 0.05; done; exit 75")
    script = start("slurm.sh", "a.yaml", SLURM_JOB_ID="5")
    log = tmp_path / "log"
    while not (log.exists() and "srun" in log.read_text()):
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    _, errors = script.communicate(timeout=PATIENCE)
    assert asked.exists()
    assert "still saving 30 s before the time limit; queueing job 5 again" in errors
    assert re.search(r"sleep (2\d|30) scontrol requeue 5", log.read_text())


@pytest.mark.parametrize("code", [1, 75])
def test_slurm_does_not_requeue_a_cancelled_job(start, programs, tmp_path, code):
    programs("srun", f"exit {code}")
    programs("scontrol")
    programs("squeue", "echo COMPLETING")
    script = start("slurm.sh", "a.yaml", SLURM_JOB_ID="5")
    _, errors = script.communicate(timeout=PATIENCE)
    assert script.returncode == code
    assert f"exit code {code}; job 5 is COMPLETING and not queued again" in errors
    assert "scontrol" not in (tmp_path / "log").read_text()


def test_slurm_tries_again_if_a_job_that_has_run_finds_a_mistake(start, programs, tmp_path):
    """A disk may be away for a while; a mistake in the config would have ended the first start."""
    programs("srun", "exit 2")
    programs("scontrol")
    programs("sleep")
    for number in range(1, 5):
        again = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(number)}
        script = start("slurm.sh", "a.yaml", **again)
        _, errors = script.communicate(timeout=PATIENCE)
        assert script.returncode == 2
    assert "failed four times in a row; not queued again" in errors
    calls = (tmp_path / "log").read_text()
    assert re.findall(r"sleep (\d+)", calls) == ["300", "600", "1200"]
    assert calls.count("scontrol requeue 5") == 3


def test_slurm_asks_a_busy_controller_again(start, programs, tmp_path):
    programs("srun", "exit 75")
    programs("sleep")
    programs("scontrol", f'[ "$(grep -o scontrol {tmp_path}/log | wc -l)" -ge 3 ]')
    assert start("slurm.sh", "a.yaml", SLURM_JOB_ID="5").wait(PATIENCE) == 75
    assert (tmp_path / "log").read_text().count("scontrol requeue 5") == 3


def test_slurm_stops_after_four_restarts_without_a_place_for_the_count(start, programs, tmp_path):
    programs("srun", "exit 1")
    programs("scontrol")
    (tmp_path / ".slurm-5.failures").symlink_to("/dev/full")
    for number in range(4):
        again = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(number)}
        assert start("slurm.sh", "a.yaml", **again).wait(PATIENCE) == 1
    assert (tmp_path / "log").read_text().count("scontrol requeue 5") == 3


def test_array_task_requeues_itself(start, programs, tmp_path):
    programs("srun", "exit 75")
    programs("scontrol")
    # The last task's job id equals the array's.
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    script = start("sweep.sh", "a.yaml", "--grid", "seed=1,2,3,4", **array)
    assert script.wait(PATIENCE) == 75
    command = "env python -m megavis.cli sweep a.yaml --grid seed=1,2,3,4 --index 3"
    assert logged(tmp_path, "srun") == f"{STEP} {command} scontrol requeue 7_3"


def test_slurm_runs_inside_a_container(start, programs, tmp_path):
    programs("srun")
    options = {"CONTAINER": "a.sif", "SRUN_OPTIONS": "--mpi=none -l"}
    assert start("slurm.sh", "a.yaml", SLURM_JOB_ID="5", **options).wait(PATIENCE) == 0
    inside = f"apptainer exec --nv --bind {tmp_path} --pwd {tmp_path} a.sif"
    command = "env python -m megavis.cli train a.yaml"
    assert logged(tmp_path, "srun") == f"{STEP} --mpi=none -l {inside} {command}"


@pytest.mark.parametrize("code", [1, 75])
def test_slurm_requeues_while_the_disk_of_its_log_is_full(start, programs, tmp_path, code):
    programs("srun", f"exit {code}")
    programs("scontrol")
    (tmp_path / ".slurm-5.failures").symlink_to("/dev/full")
    with Path("/dev/full").open("w") as log:
        script = start("slurm.sh", "a.yaml", log=log, SLURM_JOB_ID="5")
    assert script.wait(PATIENCE) == code
    assert logged(tmp_path, "scontrol") == "requeue 5"


@pytest.mark.parametrize("log", [os.devnull, "/dev/full"])
def test_slurm_forwards_the_time_limit_signal(start, programs, tmp_path, log):
    # The step ends on the signal, before the script waits for it again.
    until = "until [ -e {0} ]; do sleep 0.05; done".format
    asked, ended = tmp_path / "asked", tmp_path / "ended"
    programs("srun", f"{until(asked)}; touch {ended}; exit 75")
    programs("scontrol")
    programs("scancel", f"touch {asked}; {until(ended)}; sleep 0.2")
    with Path(log).open("w") as messages:
        process = start("slurm.sh", "a.yaml", log=messages, SLURM_JOB_ID="5")
    started = tmp_path / "log"
    while not (started.exists() and "srun" in started.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE) == 75, "the script must wait for its step"
    assert logged(tmp_path, "scancel") == "--signal=USR1 5 scontrol requeue 5"
