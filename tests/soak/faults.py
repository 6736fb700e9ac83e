"""Faults injected into a running job; each checks what must hold afterwards."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from job import Job

from megavis.checkpoint.format.folder import checkpoints_by_age
from megavis.training.faults.watchdog import HUNG_EXIT_CODE

PATIENCE = 6.0
"""Seconds of `training.hang_timeout`."""
_ENDS = 90.0
"""Seconds within which a job that cannot continue must end; work between two steps may take ten
times `PATIENCE`."""
_TOO_SMALL = 4096
"""Bytes; smaller than any file that a run writes."""


class ViolationError(AssertionError):
    """A guarantee of megavis does not hold."""


def expect(holds: bool, guarantee: str) -> None:
    if not holds:
        raise ViolationError(f"expected: {guarantee}")


def kill_one(job: Job, draw: random.Random) -> None:
    """`kill -9` of one process: the others exit."""
    victim = draw.randrange(job.size)
    job.send(victim, signal.SIGKILL)
    codes = job.wait(seconds=_ENDS)
    expect(None not in codes, f"the others exit after rank {victim} was killed; codes: {codes}")
    expect(75 not in codes, "no process takes a death for a request to stop")


def kill_all(job: Job, draw: random.Random) -> None:
    """`kill -9` of all processes at once, as in a power cut."""
    for rank in range(job.size):
        job.send(rank, signal.SIGKILL)
    job.wait(seconds=10)


def stop_one(job: Job, draw: random.Random) -> None:
    """SIGSTOP of one process: the others exit with 70. A single process continues later."""
    victim = draw.randrange(job.size)
    job.send(victim, signal.SIGSTOP)
    others = [rank for rank in range(job.size) if rank != victim]
    if not others:
        time.sleep(draw.uniform(0.1, 1.0))
        job.send(victim, signal.SIGCONT)
        return
    codes = job.wait(others, seconds=_ENDS + PATIENCE)
    job.send(victim, signal.SIGKILL)
    job.wait([victim], seconds=10)
    expect(None not in codes, f"the others exit while rank {victim} hangs; codes: {codes}")
    # After the last step no process waits for another.
    if set(codes) != {0}:
        expect(HUNG_EXIT_CODE in codes or 1 in codes, f"a hang has its exit code; codes: {codes}")


def freeze_briefly(job: Job, draw: random.Random) -> None:
    """SIGSTOP of one process for less than `PATIENCE`: training continues."""
    victim = draw.randrange(job.size)
    job.send(victim, signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, 1.5))
    job.send(victim, signal.SIGCONT)


def ask_to_stop(job: Job, draw: random.Random) -> None:
    """SIGTERM or SIGUSR1 to one process: all save and exit with 75."""
    number = draw.choice((signal.SIGTERM, signal.SIGUSR1))
    job.send(draw.randrange(job.size), number)
    codes = job.wait(seconds=60)
    expect(None not in codes, f"all exit within a minute of {number.name}; codes: {codes}")
    # A signal before training kills the process; after the last step it has no effect.
    ended = {-number, 0, 1, 75, HUNG_EXIT_CODE}
    expect(set(codes) <= ended, f"all save and stop after {number.name}; codes: {codes}")
    if 75 in codes:
        expect(set(codes) == {75}, f"all processes agree on stopping; codes: {codes}")


def tear_a_file(job: Job, draw: random.Random) -> None:
    """A power cut that damages a file of the newest checkpoint; the next start must detect it."""
    kill_all(job, draw)
    folders = checkpoints_by_age(job.run_folder)
    is_over = any(process.exitcode == 0 for process in job.processes)
    if is_over or len(folders) < 2:
        return
    # Skip files that an earlier fault has emptied.
    latest = folders[0].parent / "latest"
    files = [path for path in (*folders[0].iterdir(), latest) if _has_content(path)]
    if not files:
        return
    path = draw.choice(sorted(files))
    content = bytearray(path.read_bytes())
    damage = draw.choice(("truncate", "flip", "empty", "delete"))
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncate" else 0])


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def fill_the_disk(job: Job, draw: random.Random) -> None:
    """A full disk of one process for a while: training continues with a warning."""
    victim = job.processes[draw.randrange(job.size)]
    try:
        before = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (_TOO_SMALL, before[1]))
    except ProcessLookupError:
        return
    words = ("not saved", "not written")
    warned = job.wait_for(lambda: any(word in job.log() for word in words), seconds=60)
    expect(warned, "a failed write is logged")
    time.sleep(draw.uniform(0.0, 3.0))
    # A full disk at the last step ends the job.
    if not job.is_over():
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, before)


_ALL = "kill -9 of all"
FAULTS: dict[str, Callable[[Job, random.Random], None]] = {
    "kill -9 of one process": kill_one,
    _ALL: kill_all,
    "SIGSTOP of one process": stop_one,
    "a pause of one process": freeze_briefly,
    "SIGTERM or SIGUSR1 to one process": ask_to_stop,
    "kill -9 of all and a torn file": tear_a_file,
    "full disk of one process": fill_the_disk,
}


AT_ANY_TIME = (_ALL, "a pause of one process")
"""Faults before training begins, when processes that lose another one wait until the rendezvous
times out, unless their launcher ends them."""


def leftovers(run_folder: Path) -> list[str]:
    """Return temporary files, which no finished run may leave."""
    return [path.name for path in (run_folder / "checkpoints").glob(".*")]
