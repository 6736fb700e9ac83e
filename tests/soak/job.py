"""A training job of one to four processes, as started by a launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import saved_steps
from megavis.parallel.launch import Launch, free_port

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-zero1": (1, ()),
    "dp2-zero1": (2, ()),
    "dp2-zero3": (2, ("zero_stage=3",)),
    "tp2-sp-zero0": (
        2,
        ("tensor_model_parallel_size=2", "sequence_parallel=true", "zero_stage=0"),
    ),
    "pp2-zero0": (2, ("pipeline_model_parallel_size=2", "zero_stage=0")),
    "dp4-zero2": (4, ("zero_stage=2",)),
    "tp2-dp2-zero3": (4, ("tensor_model_parallel_size=2", "zero_stage=3")),
    "tp2-pp2-zero1": (4, ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2")),
    "cp2-dp2-zero2": (4, ("context_parallel_size=2", "zero_stage=2")),
}
"""Number of processes, and keys of `parallel`."""


def be_one_process(launch: Launch, words: list[str], log: Path) -> None:
    """Run a process of `megavis train WORDS`."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    import torch

    from megavis.cli import main

    torch.set_num_threads(1)
    os.environ.update(launch.environment())
    sys.exit(main(["train", *words, "--device", "cpu"]))


class Job:
    """The processes of one start of a run, and their logs."""

    starts = 0

    def __init__(self, config: Path, run_folder: Path, layout: str, logs: Path) -> None:
        size, parallel = LAYOUTS[layout]
        words = [str(config), f"output={run_folder.parent}", f"name={run_folder.name}"]
        words += [f"parallel.{word}" for word in parallel]
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["megavis.training.trainer"])
        self.run_folder, self.layout = run_folder, layout
        Job.starts += 1
        self.logs = [logs / f"start-{Job.starts:04d}-rank-{rank}.log" for rank in range(size)]
        self._metrics_before = _identity(run_folder / "metrics.jsonl")
        port = free_port()
        self.processes: list[Any] = [
            server.Process(
                target=be_one_process,
                args=(Launch(rank, size, rank, "127.0.0.1", port), words, log),
            )
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    @property
    def size(self) -> int:
        return len(self.processes)

    def has_begun(self) -> bool:
        """Return whether this start trains: it has then truncated the metrics to its checkpoint."""
        return _identity(self.run_folder / "metrics.jsonl") != self._metrics_before

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a process unless it has exited."""
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, number)

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def wait(self, ranks: Sequence[int] | None = None, *, seconds: float) -> list[int | None]:
        """Wait until processes exit; return their exit codes, None for those still running."""
        end = time.monotonic() + seconds
        chosen = self.processes if ranks is None else [self.processes[rank] for rank in ranks]
        for process in chosen:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in chosen]

    def log(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    def wait_for(self, reached: Any, *, seconds: float) -> bool:
        """Wait until `reached()` or the end of the job; return whether either came in time."""
        end = time.monotonic() + seconds
        while not reached() and not self.is_over():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _identity(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


def newest_step(run_folder: Path) -> int:
    """Return the newest saved step; 0 if there is none."""
    return max([0, *saved_steps(run_folder)])
