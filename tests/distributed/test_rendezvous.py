"""The rendezvous of processes on one machine is not reachable from other machines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
