"""Run units of work in this process, in local worker processes, or on a Ray cluster.

Results come in any order. Finished units are kept on failure.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from data_tools.shard_tasks import Unit, UnitResult, do_unit
from megavis.config.arguments import show_fatal_stacks
from megavis.config.errors import UserError, describe_os_error

ENGINES = ("local", "ray")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only named
# Enough to keep workers busy; few, since units in flight are reported after a kill.
_IN_FLIGHT_PER_WORKER = 2
_KILLED = "a worker process was killed (out of memory?)"
_RAY_RETRIES = 2


@dataclass(frozen=True)
class Failure:
    """Units that failed, with the reason; a rerun repeats them."""

    shards: tuple[str, ...]
    reason: str


def run_units(
    units: Sequence[Unit], *, workers: int, engine: str, advance: Callable[[int], None]
) -> Iterator[UnitResult | Failure]:
    """Yield the result of each unit; stop after the first failure.

    Args:
        units: units of work.
        workers: number of processes; 0 for this one. Ignored by Ray.
        engine: `local` or `ray`.
        advance: called with numbers of processed files, including files of earlier runs.
    """
    if engine == "ray":
        results = _on_ray(units)
    elif workers == 0:
        yield from _here(units, advance)
        return
    else:
        results = _in_processes(units, workers=workers)
    for result in results:
        if isinstance(result, UnitResult):
            advance(result.num_files)
        yield result


def _here(units: Sequence[Unit], advance: Callable[[int], None]) -> Iterator[UnitResult | Failure]:
    for unit in units:
        try:
            result = do_unit(unit, advance)
        except OSError as error:
            yield Failure((unit.shard,), describe_os_error(error))
            return
        if result.was_there:
            advance(result.num_files)
        yield result


def _in_processes(units: Sequence[Unit], *, workers: int) -> Iterator[UnitResult | Failure]:
    rest, in_flight = iter(units), workers * _IN_FLIGHT_PER_WORKER
    with _open_pool(workers) as pool:
        flying: dict[Future[UnitResult], Unit] = {}
        try:
            while True:
                for unit in itertools.islice(rest, in_flight - len(flying)):
                    flying[pool.submit(do_unit, unit)] = unit
                if not flying:
                    return
                done, _ = wait(flying, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        result = future.result()
                    except OSError as error:
                        yield Failure((flying[future].shard,), describe_os_error(error))
                        return
                    del flying[future]
                    yield result
        except BrokenProcessPool:
            shards = tuple(sorted(unit.shard for unit in flying.values()))
            yield Failure(shards, _KILLED)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def process_map(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a `map` over worker processes, or, for 0 workers, Python's `map`.

    Raises UserError if processes cannot be started, and OSError if one was killed.
    """
    if workers == 0:
        yield map
        return
    with _open_pool(workers) as pool:
        try:
            yield pool.map
        except BrokenProcessPool:
            raise OSError(_KILLED) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _open_pool(workers: int) -> ProcessPoolExecutor:
    # Spawn rather than fork: the parent may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    except OSError as error:  # semaphores are files there, which the error does not name
        raise UserError(
            f"{_SHARED_MEMORY}: {error.strerror}; worker processes need room to write there: make"
            " some, or use --workers 0"
        ) from None


def start_worker() -> None:
    """Show fatal errors of this worker process, and end it when its parent is gone.

    It would wait for its next unit.
    """
    show_fatal_stacks()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_ray(units: Sequence[Unit]) -> Iterator[UnitResult | Failure]:
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray needs Ray: run `pip install 'megavis[ray]'`, or remove --engine"
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names a running cluster
    remote = ray.remote(max_retries=_RAY_RETRIES)(_done_or_why_not)
    in_flight = max(int(ray.cluster_resources().get("CPU", 1)), 1) * _IN_FLIGHT_PER_WORKER
    rest = iter(units)
    flying: dict[Any, Unit] = {}
    while True:
        for unit in itertools.islice(rest, in_flight - len(flying)):
            flying[remote.remote(unit)] = unit
        if not flying:
            return
        done, _ = ray.wait(list(flying))
        result = _ray_result(done[0], flying.pop(done[0]))
        yield result
        if isinstance(result, Failure):
            return


def _done_or_why_not(unit: Unit) -> UnitResult | Failure | UserError:
    """Do a unit; return errors, since Ray prints exceptions that nobody retrieves."""
    try:
        return do_unit(unit)
    except UserError as error:
        return error
    except OSError as error:
        return Failure((unit.shard,), describe_os_error(error))


def _ray_result(reference: Any, unit: Unit) -> UnitResult | Failure:
    import ray

    try:
        result: UnitResult | Failure | UserError = ray.get(reference)
    except ray.exceptions.WorkerCrashedError:
        return Failure((unit.shard,), f"a Ray worker was killed {_RAY_RETRIES + 1} times")
    if isinstance(result, UserError):
        raise result
    return result
