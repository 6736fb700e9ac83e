"""Run stages part by part in worker processes, and save the result of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu_check.results import Part, Settings, StageResult, read_stage
from benchmarks.gpu_check.stages import STAGES, open_stage, run_part
from megavis.config.errors import UserError
from megavis.parallel.workers import WorkerError, WorkerPool

# Practically unlimited: jobs share one process, since they are tiny.
_MANY_JOBS = 10_000


class Worker:
    """A worker process, started on demand and replaced after a failure."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def __call__(self, job: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """Run a job; raises WorkerError, after which the next job has a new process."""
        if self._pool is None:
            self._pool = WorkerPool(1, max_jobs=_MANY_JOBS)
        try:
            return self._pool.run(job, 1, *args, timeout=timeout)[0]
        except WorkerError:
            self._pool = None
            raise

    def replace(self) -> None:
        """End the process; the next job has a new one."""
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
    ask: Worker,
    *,
    clock: Clock,
    again: bool = False,
    say: Callable[[str], None],
) -> StageResult:
    """Run the unfinished parts of a stage within the time limit.

    Args:
        settings: of the whole check.
        number: of the stage.
        ask: runs a part.
        clock: of the stage.
        again: discard earlier results.
        say: prints a line.

    Raises:
        UserError: an earlier call measured on another device, or at other sizes.
    """
    result = earlier(settings, number, again=again)
    if result.finished:
        say(f"stage {number}, {result.title}: finished earlier")
        return result
    names = _open(result, settings, ask, clock)
    for name in names:
        if name in result.parts and result.parts[name].finished:
            continue
        if clock.left <= 0:
            result.stopped = f"time limit of {clock.limit:.0f} s"
            break
        part = result.parts[name] = _measure(settings, number, name, ask, clock)
        result.save(settings.folder)
        say(f"stage {number}, {name}: {_verdict(part)} ({part.seconds:.1f} s)")
    done = [name in result.parts and result.parts[name].finished for name in names]
    result.finished = bool(done) and all(done)
    result.save(settings.folder)
    if settings.on_gpu:
        ask.replace()
    return result


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
