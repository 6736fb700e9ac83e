"""A temporary SLURM on this machine, with its own folder, ports, key and sockets."""

import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# Daemons are in folders that only root's PATH includes.
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
USER = pwd.getpwuid(os.getuid()).pw_name

# One node of 8 processors, with 8 files as GPUs. cred_expire is minimal, since a requeued job waits
# as long before it starts; GraceTime is the time that a preempted job has left.
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=ordinary Nodes=localhost Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=localhost PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs of SLURM that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Slurm:
    """SLURM's daemons, running while the context is open; commands need `environment`."""

    def __enter__(self) -> "Slurm":
        # munged requires a socket that other users can reach, unlike those in pytest's folders.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.environment = {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []
        self._configure()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._end_jobs()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        folder, user = self.folder, USER
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        port, node_port = two_free_ports()
        config = CONFIG.format(folder=folder, port=port, node_port=node_port, user=user)
        (folder / "slurm.conf").write_text(config)
        for number in range(8):
            (folder / f"gpu{number}").touch()
        gpus = f"NodeName=localhost Name=gpu File={folder}/gpu[0-7]\n"
        (folder / "gres.conf").write_text(gpus)
        # Do not use the machine's cgroups. Older versions have no `disabled` plugin, but accept a
        # mount point that does not exist.
        version = subprocess.run(
            ["slurmd", "-V"], env={"PATH": PATH}, capture_output=True, text=True
        )
        (major,) = re.findall(r"slurm\D* (\d+)\.", version.stdout)
        plugin = "disabled" if int(major) >= 23 else "cgroup/v1"
        text = f"CgroupPlugin={plugin}\nCgroupMountpoint={folder}/cgroup\n"
        (folder / "cgroup.conf").write_text(text)

    def _start(self) -> None:
        folder = self.folder
        words = [f"--{name}={folder}/munge.{name}" for name in ("socket", "log-file", "pid-file")]
        words += [f"--seed-file={folder}/munge.seed", f"--key-file={folder}/munge.key"]
        self._daemon("munged", "--foreground", *words)
        self._wait(lambda: (folder / "munge.socket").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", "localhost")
        self._wait(lambda: self.ask("sinfo", "-h", "-o", "%T") == "idle", "the node is not idle")

    def _end_jobs(self) -> None:
        """Kill jobs that a test has left, since they would outlive the daemons."""
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                is_ours = str(self.folder).encode() in environment.read_bytes()
            except OSError:
                continue  # it has exited, or belongs to another user
            if is_ours and environment.parent.name != str(os.getpid()):
                os.kill(int(environment.parent.name), signal.SIGKILL)

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("w") as log:
            environment = {**os.environ, **self.environment}
            self._daemons.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )

    def _wait(self, is_true, message: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            dead = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                raise OSError(f"{message}; exited: {dead}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def ask(self, *words: str) -> str:
        """Run a SLURM command and return its output; empty if it fails."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        return done.stdout.strip()

    def submit(self, folder: Path, *words: str, **variables: str) -> str:
        """Submit a job from this folder; return its id."""
        environment = {**os.environ, **self.environment, **variables}
        command = ["sbatch", "--parsable", *words]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
        )
        number = done.stdout.strip()
        assert number, f"sbatch {words} was refused: {done.stderr}"
        return number

    def wait_for(self, job: str, seconds: float = 240) -> dict[str, str]:
        """Wait until all tasks of a job have a final state; return the states by array index."""
        end = time.monotonic() + seconds
        while True:
            shown = self.ask("scontrol", "show", "job", job)
            states = re.findall(r"(?:ArrayTaskId=(\d+).*\n(?:.*\n)*?)? *JobState=(\w+)", shown)
            if states and all(state in FINAL for _, state in states):
                return dict(states)
            assert time.monotonic() < end, f"{job} did not end:\n{shown}\n{self.logs()}"
            time.sleep(0.1)


FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def two_free_ports() -> tuple[int, int]:
    """Return two consecutive unused ports."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as one, socket.socket() as other:
            taken = [p.connect_ex(("127.0.0.1", port + i)) for i, p in enumerate((one, other))]
            if all(taken):
                return port, port + 1
