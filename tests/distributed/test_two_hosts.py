"""`launch/deepspeed.sh` with a hostfile of two hosts, over ssh."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import ENVIRONMENT, ROOT, long_words
from run_jobs import deterministic_metrics
from two_hosts import ADDRESSES, INTERFACE, TwoHosts, unavailable_reason

pytestmark = [pytest.mark.once, pytest.mark.cluster]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts connected by ssh."""
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"no two hosts: {reason}")
    with TwoHosts() as running:
        yield running


def test_two_hosts_match_one(
    hosts: TwoHosts, tiny_config: Path, tmp_path: Path, long_run: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    # docs/scaling.md: needed where a host's name does not resolve to its address.
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    words = [str(tiny_config), "--device", "cpu", *long_words(tmp_path, "run")]
    done = subprocess.run(
        hosts.command(0, "bash", str(ROOT / "launch/deepspeed.sh"), *words),
        env={
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{hosts.folder}/bin:{ENVIRONMENT['PATH']}",
            "HOSTFILE": str(hostfile),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{ADDRESSES[1]}: " in done.stdout + done.stderr, "nothing ran on the other host"
    assert deterministic_metrics(tmp_path / "run") == deterministic_metrics(long_run)
