"""Run stages part by part in worker processes, and save the result of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from benchmarks.gpu_check.results import Part, Settings, StageResult, read_stage
from benchmarks.gpu_check.stages import STAGES, open_stage, run_part
from megavis.config.errors import UserError
from megavis.parallel.workers import WorkerError, WorkerPool

# Practically unlimited: jobs share one process, since they are tiny.
_MANY_JOBS = 10_000


class Worker:
    """Processes that run a job together, started on demand and replaced after a failure."""

    def __init__(self, num_processes: int = 1) -> None:
        self._num_processes = num_processes
        self._pool: WorkerPool | None = None

    def __call__(self, job: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """Run a job and return rank 0's result.

        Raises:
            WorkerError: it failed; the next job has new processes.
        """
        if self._pool is None:
            self._pool = WorkerPool(self._num_processes, max_jobs=_MANY_JOBS)
        try:
            return self._pool.run(job, self._num_processes, *args, timeout=timeout)[0]
        except WorkerError:
            self._pool = None
            raise

    def replace(self) -> None:
        """End the processes; the next job has new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class Clock:
    """Remaining time of a stage and of the call."""

    def __init__(self, limit: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.now = limit, now
        self._end = now() + limit

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - self.now()


def run_stage(
    settings: Settings,
    number: int,
    crew: Sequence[Worker],
    *,
    clock: Clock,
    again: bool = False,
    say: Callable[[str], None],
) -> StageResult:
    """Run the unfinished parts of a stage within the time limit.

    Args:
        settings: settings of the whole check.
        number: number of the stage.
        crew: workers that run the parts: only the first, or all at once if no part measures time.
        clock: clock of the stage.
        again: discard earlier results.
        say: prints a line.

    Raises:
        UserError: an earlier call measured on another device, or at other sizes.
    """
    result = earlier(settings, number, again=again)
    if result.finished:
        say(f"stage {number}, {result.title}: finished earlier")
        return result
    names = _open(result, settings, crew[0], clock)
    missing = [n for n in names if n not in result.parts or not result.parts[n].finished]
    at_once = STAGES[number].at_once and len(crew) > 1
    measured = _one_by_one if not at_once else _at_once
    for name, part in measured(settings, number, missing, crew, clock):
        if part is None:
            result.stopped = f"time limit of {clock.limit:.0f} s"
            continue
        result.parts[name] = part
        result.save(settings.folder)
        say(f"stage {number}, {name}: {_verdict(part)} ({part.seconds:.1f} s)")
    result.parts = {name: result.parts[name] for name in names if name in result.parts}
    done = [name in result.parts and result.parts[name].finished for name in names]
    result.finished = bool(done) and all(done)
    result.save(settings.folder)
    if settings.on_gpu:
        for worker in crew:
            worker.replace()
    return result


_Measured = Iterator[tuple[str, Part | None]]
"""Names and parts; None for a part that did not run within the time limit."""


def _one_by_one(
    settings: Settings, number: int, names: Sequence[str], crew: Sequence[Worker], clock: Clock
) -> _Measured:
    for name in names:
        if clock.left <= 0:
            yield name, None
            return
        yield name, _measure(settings, number, name, crew[0], clock)


def _at_once(
    settings: Settings, number: int, names: Sequence[str], crew: Sequence[Worker], clock: Clock
) -> _Measured:
    """Run one part at a time on each worker; all but the first have their own folders."""
    free: SimpleQueue[tuple[Settings, Worker]] = SimpleQueue()
    for place, worker in enumerate(crew):
        folder = settings.folder / "jobs" / str(place) if place else settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        free.put((replace(settings, folder=folder), worker))

    def measure(name: str) -> Part | None:
        own, worker = free.get()
        try:
            return _measure(own, number, name, worker, clock) if clock.left > 0 else None
        finally:
            free.put((own, worker))

    pool = ThreadPoolExecutor(len(crew))
    try:
        jobs = {pool.submit(measure, name): name for name in names}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        # After Ctrl-C, the caller ends the processes and thereby the jobs.
        pool.shutdown(wait=False, cancel_futures=True)


def _open(result: StageResult, settings: Settings, ask: Worker, clock: Clock) -> tuple[str, ...]:
    """Record facts about the machine; return the stage's parts, none if no process starts."""
    names: tuple[str, ...] = ()
    try:
        limit = max(clock.left, 1.0)
        result.facts, names = ask(open_stage, settings, result.stage, timeout=limit)
        result.stopped = ""
    except WorkerError as error:
        result.stopped = _last_line(error)
    return names


def earlier(settings: Settings, number: int, *, again: bool) -> StageResult:
    """Return the earlier result of a stage; an empty one if there is none, or with `again`."""
    fresh = StageResult(number, STAGES[number].title, settings.device, settings.small)
    found = None if again else read_stage(settings.folder, number)
    if found is None:
        return fresh
    if (found.device, found.small) != (settings.device, settings.small):
        sizes = "tiny" if found.small else "full"
        raise UserError(
            f"{settings.folder} holds stage {number} measured on {found.device} at {sizes} sizes;"
            " name another folder with --out, or measure anew with --again"
        )
    return found


def _measure(settings: Settings, number: int, name: str, ask: Worker, clock: Clock) -> Part:
    began = time.monotonic()
    limit = max(clock.left, 1.0)
    try:
        rows = ask(run_part, settings, number, name, timeout=limit)
    except WorkerError as error:
        seconds = time.monotonic() - began
        if seconds >= limit:
            text = f"stopped by the time limit of {clock.limit:.0f} s"
            return Part(False, seconds, text)
        return Part(False, seconds, _last_line(error), str(error))
    finally:
        if STAGES[number].fresh and settings.on_gpu:
            ask.replace()
    return Part(True, time.monotonic() - began, rows=tuple(rows))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _verdict(part: Part) -> str:
    if part.error:
        return part.error
    wrong: Sequence[str] = [row.what for row in part.rows if row.passed is False]
    return f"{len(part.rows)} rows" + (
        f", not as it should be: {'; '.join(wrong)}" if wrong else ""
    )
