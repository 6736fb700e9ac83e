"""Read rank and world size from the environment of each launcher.

`torchrun` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; `srun`
sets SLURM_*; plain `python` sets nothing and is one process.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megavis.config.errors import UserError

# The text before the first comma outside brackets, and the first number of a bracket.
_FIRST_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]+\])+")
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]")


@dataclass(frozen=True)
class Launch:
    """Rank and world size of this process, and the rendezvous address of the job."""

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """Return the variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read the launch of this process from the environment of any launcher.

    Raises:
        UserError: some of a launcher's variables are missing.
    """
    if "RANK" in environment:
        return _from_torchrun(environment)
    # A batch script, which is one process, has the SLURM_PROCID and SLURM_NTASKS of its job.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_slurm(environment)
    return Launch(0, 1, 0, "127.0.0.1", free_port())


def _from_torchrun(environment: Mapping[str, str]) -> Launch:
    needed = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if missing:
        raise UserError(
            f"RANK is set but not {', '.join(missing)}; start with torchrun, deepspeed or srun,"
            " which set all of them"
        )
    return Launch(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        master_address=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
    )


def _from_slurm(environment: Mapping[str, str]) -> Launch:
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return Launch(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        master_address=environment.get("MASTER_ADDR") or first_host(nodes),
        # Derived from the job ID: equal for all tasks, and rarely equal for two jobs on a node.
        master_port=int(environment.get("MASTER_PORT") or 20000 + job % 12768),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Args:
        nodes: comma-separated hosts and ranges, such as `gpu[03-05,9],login`, for which this
            returns `gpu03`, or `rack[1-2]node[3-4]`, for which it returns `rack1node3`.

    Raises:
        UserError: the list is empty or malformed.
    """
    entry = _FIRST_ENTRY.match(nodes)
    host = _BRACKET.sub(r"\1", entry.group()) if entry else ""
    # The match must end at a comma or at the end; anything else is an unclosed bracket.
    if not entry or nodes[entry.end() : entry.end() + 1] not in ("", ",") or "[" in host:
        state = f"{nodes!r} is malformed" if nodes else "is empty"
        raise UserError(f"SLURM_STEP_NODELIST {state}; start with srun, or set MASTER_ADDR")
    return host


def free_port() -> int:
    """Return a free port below the system's range of ephemeral ports.

    An ephemeral port that is free now may be taken by any outgoing connection before rank 0
    listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
