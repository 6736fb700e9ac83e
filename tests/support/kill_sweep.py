"""Kill `palette shards` at random times until it finishes; compare with an uninterrupted run.

As a script this runs a long sweep with worker processes; the test is short and has none:

    PYTHONPATH=.:tests/support python tests/support/kill_sweep.py --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from image_files import encoded, real_jpegs, tree
from PIL import Image

from data_tools.__main__ import main
from data_tools.job_report import say
from megavis.tokenizers.palette import Palette

_MOST_SHARDS, _LONGEST_WAIT = 6, 0.05
"""A kill comes at most this many shards into a run, plus at most this many seconds."""


def write_images(folder: Path, *, count: int) -> list[str]:
    """Write `count` small JPEGs and a palette; return the command that converts them to shards."""
    (folder / "images").mkdir(parents=True)
    files = real_jpegs()
    for number in range(count):
        small = Image.open(files[number % len(files)]).convert("RGB").resize((96, 80 + number % 9))
        (folder / "images" / f"{number:05d}.jpg").write_bytes(encoded(small, "JPEG"))
    centers = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    Palette(centers).save(folder / "palette.npy")
    words = ["palette", "shards", str(folder / "images"), "--size", "16"]
    return [*words, "--palette", str(folder / "palette.npy"), "--samples-per-shard", "8"]


def killed_after(words: list[str], seconds: float) -> int:
    """Run the command in a fork that is killed after `seconds` of CPU time; return its exit code.

    SIGPROF ends a process at once, as SIGKILL does. Its timer counts CPU time, so that the load of
    the machine does not matter. The exit code of a killed run is negative.
    """
    child = os.fork()
    if child == 0:
        # Objects of other tests may belong to threads, which a fork does not have.
        gc.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os._exit(main(words))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def spawned(words: list[str]) -> int:
    """Start the command in a new process group; return its process id."""
    return subprocess.Popen(
        [sys.executable, "-m", "data_tools", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).pid


def sweep(
    start: Callable[[], int],
    out: Path,
    *,
    kills: int,
    victim: Callable[[int], int] = lambda number: number,
    seed: int = 0,
) -> tuple[int, int]:
    """Run the command repeatedly, killing it at random times.

    Args:
        start: starts the command and returns its process id.
        out: its shard folder.
        kills: number of kills, after which it may finish.
        victim: maps the id of the started process to that of the process to kill.
        seed: of the times.

    Returns:
        The number of killed runs, and how many of them finished at least one shard.
    """
    moments = random.Random(seed)
    killed = progress = 0
    while True:
        before = finished(out)
        child = start()
        if killed < kills:
            wait_for_work(out, child, shards=moments.randrange(_MOST_SHARDS))
            time.sleep(moments.uniform(0, _LONGEST_WAIT))
            stop(victim(child))
        _, status = os.waitpid(child, 0)
        if status == 0:
            return killed, progress
        killed += 1
        progress += finished(out) > before


def finished(out: Path) -> int:
    """Return the number of finished shards."""
    return len(list(out.glob("*.index.json")))


def wait_for_work(out: Path, child: int, *, shards: int) -> None:
    """Wait until the command has created a file and finished `shards` shards, or has exited."""
    files, goal = state(out), finished(out) + shards
    # New files, not any change: leftovers of a killed run are removed long before the next shard.
    while state(out) <= files or finished(out) < goal:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)


def state(out: Path) -> set[str]:
    """Return the names of the files in the folder."""
    return set(os.listdir(out)) if out.exists() else set()


def stop(process: int) -> None:
    """Kill a process unless it has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def children(process: int) -> list[int]:
    """Return the ids of a process's children."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def workers_of(process: int) -> list[int]:
    """Return the worker processes of a command, without the resource tracker."""
    return children(process)[1:]


def long_sweep(kills: int, count: int, *, workers: Sequence[int], seed: int) -> None:
    """Sweep in rounds, killing the command or one of its workers at random.

    Args:
        kills: total number of kills.
        count: images per round.
        workers: numbers of worker processes, for the rounds in turn.
        seed: of times and victims.
    """
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        words = write_images(Path(folder), count=count)
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        assert main([*words, "--out", str(whole)]) == 0
        total, rounds, again = 0, 0, 0
        while total < kills:
            for path in broken.glob("*") if broken.exists() else ():
                path.unlink()
            options = ["--out", str(broken), "--workers", str(workers[rounds % len(workers)])]
            killed, progress = sweep(
                functools.partial(spawned, [*words, *options]),
                broken,
                kills=kills - total,
                victim=lambda child: choice.choice([child, *workers_of(child)]),
                seed=choice.getrandbits(32),
            )
            one, other = tree(broken), tree(whole)
            differ = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            assert not differ, f"round {rounds} differs in {sorted(differ)}"
            say(f"round {rounds}, {options[-1]} workers: {killed} kills, {progress} after progress")
            total, rounds, again = total + killed, rounds + 1, again + progress
        say(
            f"{total} kills in {rounds} rounds of {finished(whole)} shards; {again} of them after "
            "another shard was finished; every round ended byte-identical"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A long sweep of kills.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 0, 1])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    long_sweep(options.kills, options.images, workers=options.workers, seed=options.seed)
