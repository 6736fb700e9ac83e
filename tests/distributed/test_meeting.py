"""Where the processes of one machine meet, no other machine can listen in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch

pytestmark = pytest.mark.once

_LISTENING = "0A"  # of the kernel's table of sockets


def listening_addresses(launch: Launch) -> list[str]:
    """Return the addresses, as the kernel writes them, on which the job's port is open."""
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
def test_processes_of_one_machine_meet_on_it(
    run_job: Callable[..., list[Any]], processes: int, addresses: list[str]
) -> None:
    assert run_job(listening_addresses, processes) == [addresses] * processes
