"""Read rank and world size from the environment of each launcher.

`torchrun` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; `srun`
sets SLURM_*; plain `python` sets nothing and is one process.
"""

from __future__ import annotations

import random
import re
import reprlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megavis.config.errors import UserError

# The text before the first comma outside brackets, and the first number of a bracket.
_FIRST_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]+\])+")
_LAST_PORT = 65535
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]")

LISTENING: dict[int, socket.socket] = {}
"""Loopback sockets by port that are already listening. Rank 0's first context takes its job's
socket, so that the other ranks can connect before rank 0 has joined."""


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
        UserError: some of a launcher's variables are missing or are not valid numbers.
    """
    if "RANK" in environment:
        return _from_torchrun(environment)
    # A batch script, which is one process, has the SLURM_PROCID and SLURM_NTASKS of its job.
    if _number(environment, "SLURM_STEP_NUM_TASKS", default=1) > 1:
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
    world_size = _number(environment, "WORLD_SIZE", least=1)
    return Launch(
        rank=_number(environment, "RANK", most=world_size - 1),
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK"),
        master_address=environment["MASTER_ADDR"],
        master_port=_number(environment, "MASTER_PORT", least=1, most=_LAST_PORT),
    )


def _from_slurm(environment: Mapping[str, str]) -> Launch:
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    # The steps of a job may run side by side; a prime keeps them apart from the jobs that follow.
    job = _number(environment, "SLURM_JOB_ID", default=0)
    job += 4099 * _number(environment, "SLURM_STEP_ID", default=0)
    # Derived from job and step: equal for all tasks, and rarely equal for two on a node.
    port = 20000 + job % 12768
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT", least=1, most=_LAST_PORT)
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS")
    return Launch(
        rank=_number(environment, "SLURM_PROCID", most=world_size - 1),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID", default=0),
        master_address=environment.get("MASTER_ADDR") or first_host(nodes),
        master_port=port,
    )


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    least: int = 0,
    most: int | None = None,
) -> int:
    """Return a variable as a whole number.

    Raises:
        UserError: it is not a whole number from `least` to `most`, or absent without a default.
    """
    text = environment.get(name, "" if default is None else str(default))
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    legal = f"{least} or more" if most is None else f"{least} to {most}"
    raise UserError(
        f"{name} is {reprlib.repr(text)}, not a whole number of {legal}; start with torchrun,"
        f" deepspeed or srun, which set it, or `unset {name}` to run one process"
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
