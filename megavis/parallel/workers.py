"""A pool of local worker processes that persist between jobs.

Importing torch, DeepSpeed and Megatron takes about ten seconds; a pool does so once. Each job runs
a function on the first N workers, which connect over the loopback interface.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.context
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megavis.config.errors import UserError
from megavis.parallel.launch import LISTENING, Launch

Job = Callable[..., Any]


class WorkerError(RuntimeError):
    """A job failed; the message contains the worker's rank and traceback.

    Attributes:
        mistake: the UserError that ended it, if it was one.
    """

    def __init__(self, text: str, mistake: UserError | None = None) -> None:
        super().__init__(text)
        self.mistake = mistake


class WorkerPool:
    """Worker processes on this machine; a context manager that kills them on exit."""

    def __init__(
        self,
        num_workers: int,
        *,
        max_jobs: int = 12,
        preload: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        """Start the processes.

        Args:
            max_jobs: jobs after which the processes are restarted, which frees whatever libraries
                have kept of earlier jobs.
            preload: modules that a fork server imports once, so that workers start quickly. Only
                the first pool of a process sets them. Do not use it for jobs on GPUs, since CUDA
                does not survive a fork.
            quiet: discard the output of the workers, and of the fork server if this pool starts it;
                exceptions are still reported.
        """
        self._num_workers, self._max_jobs = num_workers, max_jobs
        self._preload, self._quiet = preload, quiet
        self._start()

    def _start(self) -> None:
        starter: multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
        starter = multiprocessing.get_context("spawn")
        if self._preload:
            starter = multiprocessing.get_context("forkserver")
            starter.set_forkserver_preload(list(self._preload))
            with discarded_output() if self._quiet else contextlib.nullcontext():
                # The server inherits it, and libraries warn when they are imported.
                forkserver.ensure_running()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._jobs = 0
        for _ in range(self._num_workers):
            mine, theirs = starter.Pipe()
            settings = (theirs, self._quiet)
            process = starter.Process(target=_serve, args=settings, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, job: Job, num_processes: int, *args: Any, timeout: float = 600.0) -> list[Any]:
        """Run `job(launch, *args)` on `num_processes` workers; return the results by rank.

        Raises:
            WorkerError: a worker raised, died or timed out; the pool is closed, since the other
                workers may be blocked in a collective.
        """
        if self._jobs == self._max_jobs:
            self.close()
            self._start()
        self._jobs += 1
        # Listen before any worker connects: torch retries a refused connection only after half a
        # second, longer than a small job takes.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address, port = listening.getsockname()
            for rank in range(num_processes):
                launch = Launch(rank, num_processes, rank, address, port)
                self._pipes[rank].send((job, launch, args))
            if num_processes > 1:
                reduction.send_handle(self._pipes[0], listening.fileno(), self._processes[0].pid)
        results: dict[int, Any] = {}
        waiting = {self._pipes[rank]: rank for rank in range(num_processes)}
        while waiting:
            ready = wait(list(waiting), timeout=timeout)
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer in {timeout} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                results[rank] = self._receive(pipe, rank)
        return [results[rank] for rank in range(num_processes)]

    def _receive(self, pipe: Connection, rank: int) -> Any:
        try:
            succeeded, value = pipe.recv()
        except (EOFError, ConnectionError):
            self._fail(f"rank {rank} died")
        if not succeeded:
            text, issues = value
            mistake = None if issues is None else UserError.of(issues)
            self._fail(f"rank {rank} raised:\n{text}", mistake)
        return value

    def _fail(self, reason: str, mistake: UserError | None = None) -> None:
        self.close()
        raise WorkerError(reason, mistake)

    def close(self) -> None:
        """Kill all workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def discarded_output(*streams: int) -> Iterator[None]:
    """Discard what is written inside the block by libraries in C, and by processes started in it.

    Args:
        streams: file descriptors; default: standard output and error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {stream: os.dup(stream) for stream in streams or (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in kept:
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def _serve(pipe: Connection, quiet: bool) -> None:
    # Several workers share this machine's cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    # Keep what libraries print out of the command's own output.
    sys.stdout = sys.stderr
    import torch

    torch.set_num_threads(1)
    # DeepSpeed runs the garbage collector whenever ZeRO-3 starts. Freezing the imported objects
    # keeps it from touching, and so copying, the pages shared with the fork server.
    gc.freeze()
    while True:
        try:
            job, launch, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            with contextlib.ExitStack() as opened:
                if launch.rank == 0 and launch.world_size > 1:
                    listening = socket.socket(fileno=reduction.recv_handle(pipe))
                    LISTENING[launch.master_port] = opened.enter_context(listening)
                    opened.callback(LISTENING.clear)
                value = job(launch, *args)
            pipe.send((True, value))
        # Also `SystemExit`: a worker that ends silently would be reported as dead, without a
        # reason.
        except BaseException as error:
            # Not the error itself: subclasses have arguments of their own and cannot be unpickled.
            issues = error.issues if isinstance(error, UserError) else None
            pipe.send((False, (traceback.format_exc(), issues)))
        # An engine contains reference cycles, and its process groups have threads.
        gc.collect()
