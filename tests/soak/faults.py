"""What is done to a running job; each fault says what must be true afterwards, or raises."""

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
"""Seconds in which a job that cannot go on must have ended; what comes between two steps may take
ten times the patience."""
_TOO_SMALL = 4096
"""Bytes that nothing fits in which a run writes."""


class BrokenPromiseError(AssertionError):
    """Something that megavis promises was not true."""


def expect(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenPromiseError(promise)


def kill_one(job: Job, draw: random.Random) -> None:
    """`kill -9` of one process: the others end by themselves, and say which is dead."""
    victim = draw.randrange(job.size)
    job.send(victim, signal.SIGKILL)
    codes = job.wait(seconds=_ENDS)
    expect(None not in codes, f"the others end after rank {victim} was killed; they are {codes}")
    expect(75 not in codes, "nobody takes a death for a wish to stop")


def kill_all(job: Job, draw: random.Random) -> None:
    """`kill -9` of all at once, as a power cut."""
    for rank in range(job.size):
        job.send(rank, signal.SIGKILL)
    job.wait(seconds=10)


def stop_one(job: Job, draw: random.Random) -> None:
    """SIGSTOP of one process: the others notice and end with 70. One alone just continues later."""
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
    expect(None not in codes, f"others end while rank {victim} hangs; {codes}")
    # After the last step nobody waits for anybody.
    if set(codes) != {0}:
        expect(HUNG_EXIT_CODE in codes or 1 in codes, f"a hang gives its exit code; {codes}")


def freeze_briefly(job: Job, draw: random.Random) -> None:
    """SIGSTOP of one process for less than the patience: nothing happens."""
    victim = draw.randrange(job.size)
    job.send(victim, signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, 1.5))
    job.send(victim, signal.SIGCONT)


def ask_to_stop(job: Job, draw: random.Random) -> None:
    """SIGTERM or SIGUSR1 to one process: all save and end with 75."""
    number = draw.choice((signal.SIGTERM, signal.SIGUSR1))
    job.send(draw.randrange(job.size), number)
    codes = job.wait(seconds=60)
    expect(None not in codes, f"all end within a minute of {number.name}; they are {codes}")
    # A signal before training or after the last step kills, or comes too late.
    ended = {-number, 0, 1, 75, HUNG_EXIT_CODE}
    expect(set(codes) <= ended, f"all save and stop after {number.name}; {codes}")
    if 75 in codes:
        expect(set(codes) == {75}, f"all processes agree on stopping; {codes}")


def tear_a_file(job: Job, draw: random.Random) -> None:
    """A power cut that spoils a file of the newest checkpoint; the next start must tell."""
    kill_all(job, draw)
    folders = checkpoints_by_age(job.run_folder)
    is_over = any(process.exitcode == 0 for process in job.processes)
    if is_over or len(folders) < 2:
        return
    # One that is torn already stays as it is until the run saves again.
    latest = folders[0].parent / "latest"
    files = [path for path in (*folders[0].iterdir(), latest) if _has_content(path)]
    if not files:
        return
    path = draw.choice(sorted(files))
    content = bytearray(path.read_bytes())
    harm = draw.choice(("cut", "flip", "empty", "gone"))
    if harm == "gone":
        path.unlink()
    elif harm == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2 if harm == "cut" else 0])


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def fill_the_disk(job: Job, draw: random.Random) -> None:
    """No checkpoint fits on one process's disk for a while: training continues, and says so."""
    victim = job.processes[draw.randrange(job.size)]
    try:
        before = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (_TOO_SMALL, before[1]))
    except ProcessLookupError:
        return
    words = ("not saved", "not written")
    told = job.wait_for(lambda: any(word in job.log() for word in words), seconds=60)
    expect(told, "what is not on the disk is told")
    time.sleep(draw.uniform(0.0, 3.0))
    # At the last step it is an error by right.
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
"""Before training has begun, processes that lose one wait for it until they give up meeting, if
their launcher does not end them."""


def leftovers(run_folder: Path) -> list[str]:
    """Return what no finished run leaves behind."""
    return [path.name for path in (run_folder / "checkpoints").glob(".*")]
