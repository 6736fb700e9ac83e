"""`python -m benchmarks.gpu_check`; see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import benchmarks.gpu_check as package
from benchmarks.gpu_check.driver import Clock, Worker, run_stage
from benchmarks.gpu_check.report import write_report
from benchmarks.gpu_check.results import Settings, read_stage
from benchmarks.gpu_check.stages import STAGES, count_gpus
from megavis.config.errors import UserError

_OUT = Path("runs/gpu_check")
_STARTS = 300.0
"""Seconds within which a process must have imported torch."""

_MOST_PROCESSES = 8
"""Largest number of processes of a stage that needs several: the GPUs of a usual node."""

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=_OUT, help=f"default: {_OUT}")
    made.add_argument("--stages", type=_stages, default=list(STAGES), help="default: all; 1,3")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; cpu means --small")
    made.add_argument("--small", action="store_true", help="tiny sizes: run every code path")
    made.add_argument("--again", action="store_true", help="measure finished stages again")
    made.add_argument("--jobs", type=_jobs, help="parts at once, where none measures time")
    made.add_argument("--limit", type=float, default=9.5, help="minutes a stage; default: 9.5")
    made.add_argument("--total", type=float, help="minutes of this call; default: no limit")
    return made


def _stages(text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not set(numbers) <= set(STAGES):
        raise argparse.ArgumentTypeError(f"{text!r} names no stages; give for example 1,3")
    return numbers


def _jobs(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of jobs; give for example 8")
    return number


def main(words: Sequence[str] | None = None) -> int:
    """Run the stages and write the report.

    Returns:
        0 if all requested stages have finished and passed, 1 if not, 2 after a user's mistake, 130
        if interrupted.
    """
    options = parser().parse_args(words)
    # Set both: a background job of a shell ignores SIGINT unless a handler is set.
    before = {each: signal.signal(each, _interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    crew = [Worker() for _ in range(_num_jobs(options))]
    try:
        return _run(options, crew)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        for worker in crew:
            worker.replace()
        for each, handler in before.items():
            signal.signal(each, handler)


def _num_jobs(options: argparse.Namespace) -> int:
    """Return the number of worker processes: one on a CPU, else one for two cores, up to eight."""
    if options.jobs is not None:
        return int(options.jobs)
    return 1 if options.device == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))


def _settings(options: argparse.Namespace, worker: Worker) -> Settings:
    if options.limit <= 0 or (options.total is not None and options.total <= 0):
        raise UserError("--limit and --total are minutes above 0")
    processes = 2
    if options.device == "cpu":
        # Hide GPUs from libraries that look for one themselves.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not (processes := min(worker(count_gpus, timeout=_STARTS), _MOST_PROCESSES)):
        raise UserError("no GPU found; --device cpu runs every stage on tiny sizes without one")
    options.out.mkdir(parents=True, exist_ok=True)
    device = options.device or "cuda"
    small = options.small or device == "cpu"
    return Settings(device, small, options.out.resolve(), processes)


def _run(options: argparse.Namespace, crew: Sequence[Worker]) -> int:
    settings = _settings(options, crew[0])
    total = Clock(60 * options.total) if options.total else None
    code = 0
    try:
        for number in options.stages:
            limit = 60 * options.limit if total is None else min(60 * options.limit, total.left)
            if limit <= 0:
                break
            with _crew_of(number, settings, crew) as workers:
                run_stage(
                    settings, number, workers, clock=Clock(limit), again=options.again, say=_say
                )
    except KeyboardInterrupt:
        _say("interrupted; the same command continues with the part that was running")
        code = INTERRUPTED
    finished = _finish(settings, options.stages)
    return code or finished


@contextlib.contextmanager
def _crew_of(number: int, settings: Settings, crew: Sequence[Worker]) -> Iterator[Sequence[Worker]]:
    """Yield the stage's workers: `crew`, or one with several processes, which end afterwards."""
    if not STAGES[number].several:
        yield crew
        return
    together = Worker(settings.processes)
    try:
        yield [together]
    finally:
        together.replace()


def _finish(settings: Settings, asked: Sequence[int]) -> int:
    """Write the report of all existing stages; return 0 if the requested ones passed."""
    found = {number: read_stage(settings.folder, number) for number in STAGES}
    results = [result for result in found.values() if result is not None]
    _say(f"report: {write_report(settings.folder, results)}")
    right = [
        (result := found[number]) is not None
        and result.finished
        and not any(row.passed is False for row in result.rows)
        for number in asked
    ]
    return 0 if all(right) else 1


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
