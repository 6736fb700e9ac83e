"""The rendezvous of processes on one machine is not reachable from other machines."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megavis.config.errors import UserError
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch

pytestmark = pytest.mark.once

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


def listening_addresses(launch: Launch) -> list[str]:
    """Return the addresses in /proc/net/tcp on which the job's port is open."""
    open_context(launch, device="cpu")
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    close_context()
    places = [row[1].split(":") for row in rows if row[3] == _LISTENING]
    return [address for address, port in places if int(port, 16) == launch.master_port]


@pytest.mark.parametrize(("processes", "addresses"), [(1, []), (2, ["0100007F"])])
def test_single_machine_rendezvous_is_local(
    run_job: Callable[..., list[Any]], processes: int, addresses: list[str]
) -> None:
    assert run_job(listening_addresses, processes) == [addresses] * processes


def test_a_port_in_use_is_one_sentence(tiny_config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = ["train", str(tiny_config), f"output={tmp_path}", "--device", "cpu"]
        done = subprocess.run(
            [sys.executable, "-m", "megavis.cli", *words, "parallel.zero_stage=1"],
            env={**os.environ, **place, **where},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    sentence = f"error: port {port} of 127.0.0.1, where the processes of this job would meet, is in"
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        # torch's words, where another node's name is the address.
        (dist.DistNetworkError("code: -98, name: EADDRINUSE, message: in use"), UserError),
        (dist.DistNetworkError("The client socket has timed out"), dist.DistNetworkError),
        (PermissionError(13, "Permission denied"), PermissionError),
    ],
    ids=["in use", "nobody listens", "not allowed"],
)
def test_only_a_port_in_use_is_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def join(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(raised):
        open_context(Launch(0, 2, 0, "node00", 29500), device="cpu")
