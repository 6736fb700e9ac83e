"""Faults in training: signals, killed and hung processes, bad gradients, full disks."""

import errno
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_jobs import deterministic_metrics, train_run

from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps, step_folder
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.state import save
from megavis.cli import main, run_process
from megavis.model.inference import Inference
from megavis.parallel.launch import Launch, free_port
from megavis.parallel.workers import WorkerError
from megavis.training.callbacks.validation import Validate
from megavis.training.engine import Engine
from megavis.training.faults import watchdog
from megavis.training.faults.watchdog import HUNG_EXIT_CODE, Watchdog
from megavis.training.metrics import read_metrics

pytestmark = pytest.mark.once

HANGS_AFTER = 600.0
"""Timeout in seconds."""


def run_command(launch: Launch, words: list[str], log: Path) -> None:
    """Run one process of `megavis train`, as a launcher would start it."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # keep the collector from scanning imported modules
    os.environ.update(launch.environment())
    sys.exit(main(["train", *words, "--device", "cpu"]))


class Job:
    """Two processes of a training run, and their logs."""

    def __init__(
        self,
        server: Any,
        words: list[str],
        folder: Path,
        target: Callable[..., None] = run_command,
    ) -> None:
        port = free_port()
        self.logs = [folder / f"rank-{rank}.log" for rank in range(2)]
        self.processes = [
            server.Process(
                target=target, args=(Launch(rank, 2, rank, "127.0.0.1", port), words, log)
            )
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def send(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, rank: int, seconds: float = HANGS_AFTER) -> int | None:
        self.processes[rank].join(seconds)
        return self.processes[rank].exitcode

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()


@pytest.fixture
def start(tiny_config: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start training on two processes; kill them after the test."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["megavis.training.trainer"])
    jobs: list[Job] = []

    def begin(*words: str, target: Callable[..., None] = run_command) -> Job:
        jobs.append(Job(server, [str(tiny_config), f"output={tmp_path}", *words], tmp_path, target))
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.join()


def wait_for_step(run_folder: Path, step: int) -> None:
    end = time.monotonic() + HANGS_AFTER
    while all(line["step"] < step for line in read_metrics(run_folder)):
        assert time.monotonic() < end, f"the run did not reach step {step}"
        time.sleep(0.01)


def wait_for_line(path: Path, count: int) -> None:
    end = time.monotonic() + 600
    while len(path.read_text().splitlines()) < count:
        assert time.monotonic() < end, f"{path} has no {count} lines"
        time.sleep(0.01)


LONG = ("training.steps=40", "checkpoint.every=0", "name=run")


def test_signal_to_one_process_checkpoints_and_stops_all(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    unbroken = start(*LONG, "name=unbroken")
    assert [unbroken.wait(rank) for rank in range(2)] == [0, 0]

    job = start(*LONG)
    wait_for_step(tmp_path / "run", 3)
    job.send(1, signal.SIGTERM)

    assert [job.wait(rank) for rank in range(2)] == [75, 75]
    assert "stopped by a signal" in job.log(0)
    (step,) = saved_steps(tmp_path / "run")
    assert 3 <= step < 40
    again = start(*LONG)
    assert [again.wait(rank) for rank in range(2)] == [0, 0]
    ours, theirs = (deterministic_metrics(tmp_path / name) for name in ("run", "unbroken"))
    assert ours == theirs


def test_killed_process_is_named(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(*LONG, "training.steps=100000")
    wait_for_step(tmp_path / "run", 3)
    time.sleep(1.5)  # until each process has sent its first heartbeat
    job.send(1, signal.SIGKILL)
    assert job.wait(0) == 1
    named = re.findall(r"megavis: (rank \d) on \S+ does not answer.* heard of in (.*)", job.log(0))
    assert [rank for rank, _ in named] == ["rank 1"]
    assert re.fullmatch(r"(what follows )?step \d+", named[0][1])


def test_second_job_in_a_run_folder_is_refused(start: Callable[..., Job], tmp_path: Path) -> None:
    words = (*LONG, "training.steps=100000")
    first = start(*words)
    wait_for_step(tmp_path / "run", 3)
    before = (tmp_path / "run" / "starts.jsonl").read_text()
    second = start(*words)
    assert [second.wait(rank) for rank in range(2)] == [2, 2]
    holder = rf"run: another job trains in this run folder \(process {first.processes[0].pid} on "
    assert re.search(holder, second.log(0))
    assert (tmp_path / "run" / "starts.jsonl").read_text() == before
    wait_for_step(tmp_path / "run", read_metrics(tmp_path / "run")[-1]["step"] + 2)

    for rank in range(2):
        first.send(rank, signal.SIGKILL)
        first.wait(rank)
    start(*words)
    wait_for_line(tmp_path / "run" / "starts.jsonl", 2)


def test_damaged_metrics_are_said_by_every_process(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """A launcher takes another code, or a process that waits for the main one, for a fault."""
    words = ("training.steps=2", "checkpoint.every=1", "schedule.warmup_steps=0", "name=run")
    first = start(*words)
    assert [first.wait(rank) for rank in range(2)] == [0, 0]
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("\0\0\n" + path.read_text())
    again = start(*words, "training.steps=3")
    assert [again.wait(rank) for rank in range(2)] == [2, 2]
    assert "metrics.jsonl, line 1: no JSON object with a step" in again.log(0)


def fail_alone(launch: Launch, words: list[str], log: Path, *, place: str) -> None:
    """Run one process of `megavis train`; rank 1 fails after its second step.

    From then on its groups behave like NCCL's: destroying them waits for rank 0, which waits for
    rank 1 in a collective.
    """
    destroy, step, measure = dist.destroy_process_group, Engine.train_step, Validate.measure
    patch, has_failed = pytest.MonkeyPatch(), []

    def fail() -> None:
        has_failed.append(True)
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        raise RuntimeError(f"a fault in {place}")

    def failing_step(engine: Engine, batches: Any, number: int) -> Any:
        return fail() if number == 2 else step(engine, batches, number)

    def failing_measure(self: Validate, state: Any, *, may_break_off: bool) -> Any:
        return fail() if may_break_off else measure(self, state, may_break_off=may_break_off)

    patch.setattr(
        dist,
        "destroy_process_group",
        lambda: time.sleep(HANGS_AFTER) if has_failed else destroy(),
    )
    if launch.rank == 1 and place == "the step":
        patch.setattr(Engine, "train_step", failing_step)
    elif launch.rank == 1:
        patch.setattr(Validate, "measure", failing_measure)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    os.environ.update(launch.environment())
    sys.argv = ["megavis", "train", *words, "--device", "cpu"]
    run_process()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("the step", ()),
        # At the end of a validation, all processes gather the weights again.
        ("validation", ("optimizer.ema_decay=0.9", "training.validate_every=2")),
    ],
)
def test_process_that_fails_alone_says_why_and_ends(
    start: Callable[..., Job], place: str, words: tuple[str, ...]
) -> None:
    job = start(*LONG, *words, target=functools.partial(fail_alone, place=place))
    assert job.wait(1, seconds=120) == 1
    assert f"RuntimeError: a fault in {place}\n" in job.log(1)
    assert "[rank1]: Traceback (most recent call last)" in job.log(1)
    assert job.wait(0) == 1


def work_slowly(launch: Launch, words: list[str], log: Path) -> None:
    """Run one process of `megavis train`; a pass outside of training takes 0.3 s.

    What follows a step may take 3.6 s, where it does not go on.
    """
    expect, predictions = Watchdog.expect, Inference.predictions

    def hurried(self: Watchdog, doing: str, *, times: int = 1) -> Any:
        return expect(self, doing, times=0.02 if doing.startswith("what follows") else times)

    def slow(*words: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return predictions(*words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "expect", hurried)
        patch.setattr(Inference, "predictions", slow)
        run_command(launch, words, log)


@pytest.mark.parametrize(
    "words",
    [
        # 32 of 64 tokens are drawn, one in each pass.
        ("training.sample_every=1", "training.sample_images=2"),
        # 20 images on each process.
        ("training.validate_every=2", "training.micro_batch_size=1", "training.batch_size=2"),
    ],
)
def test_slow_work_that_goes_on_is_not_a_hang(
    start: Callable[..., Job], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Started again, the run would come to the same work, and never get past it."""
    short = ("training.steps=2", "schedule.warmup_steps=1")
    job = start(*LONG, *short, *words, target=work_slowly)
    assert [job.wait(rank) for rank in range(2)] == [0, 0], job.log(0)
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.parametrize("hung", [0, 1])
def test_hung_process_is_reported_with_stacks(
    start: Callable[..., Job], tmp_path: Path, hung: int
) -> None:
    """Rank 0 hosts the store, so the others lose their answers when it hangs."""
    other = 1 - hung
    job = start(*LONG, "training.steps=100000", "training.hang_timeout=2")
    wait_for_step(tmp_path / "run", 3)
    time.sleep(1.5)
    job.send(hung, signal.SIGSTOP)
    assert job.wait(other) == HUNG_EXIT_CODE
    log = job.log(other)
    waited = rf"rank {other} on \S+ has waited for 2 s or more in (what follows )?step \d+"
    folder = tmp_path / "run" / "stacks"
    assert re.search(rf"megavis: {waited}; the stacks of each rank N: {folder}/rank-N.txt\n", log)
    assert "Thread 0x" not in log
    stacks = (folder / f"rank-{other}.txt").read_text()
    assert re.match(rf"20\S+ {waited}\n", stacks)
    assert any(f"in {name}" in stacks for name in ("train_step", "_after_step", "exchange"))
    assert re.search(rf"megavis: rank {hung} on \S+ .*does not answer: it is dead or hangs", log)
    # Once continued, the process finds the others gone and exits.
    job.send(hung, signal.SIGCONT)
    assert job.wait(hung) not in (None, 0)


def train_with_bad_steps(launch: Launch, path: str, words: list[str], bad: tuple) -> None:
    """Train; the loss of rank 1 is NaN at the steps `bad`."""
    step = Engine.train_step

    def with_bad_loss(engine: Engine, batches: Any, number: int) -> torch.Tensor:
        spoils = launch.rank == 1 and number + 1 in bad
        real = engine.objective.loss
        loss = (lambda *words: real(*words) * float("nan")) if spoils else real
        engine.deepspeed.module.loss = engine.deepspeed.module.loss_fn = loss
        return step(engine, batches, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", with_bad_loss)
        patch.setattr(watchdog, "_BEAT_SECONDS", 0.1)  # a failure is reported after four
        train_run(launch, path, words)


@pytest.mark.parametrize(
    "layout",
    [
        ("zero_stage=0",),
        ("zero_stage=1", "bf16"),
        ("zero_stage=3",),
        ("zero_stage=2", "float32", "parallel.pipeline_model_parallel_size=2"),
        ("zero_stage=3", "bf16", "parallel.pipeline_model_parallel_size=2"),
    ],
)
def test_steps_with_non_finite_gradients_are_skipped(
    run_job: Callable[..., list[Any]], tiny_config: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    words = [
        f"output={tmp_path}",
        f"parallel.{layout[0]}",
        "training.steps=5",
        "schedule.warmup_steps=1",
    ]
    words += ["checkpoint.every=1", "training.log_every=5"]
    words += [f"training.precision={precision}" for precision in layout[1:2]] + [*layout[2:]]
    run_job(train_with_bad_steps, 2, str(tiny_config), words, (3, 4))

    folder = tmp_path / "tiny"
    manifests = [read_manifest(step_folder(folder, step)) for step in range(1, 6)]
    contents = [
        {name: stored.sha256 for name, stored in manifest.files.items()} for manifest in manifests
    ]
    assert contents[1] == contents[2] == contents[3]
    assert contents[0] != contents[1]
    assert contents[3] != contents[4]
    (line,) = deterministic_metrics(folder)
    assert line["steps_skipped"] == 2

    words += ["name=given_up", "training.max_bad_steps=2"]
    with pytest.raises(WorkerError, match="2 steps in a row, up to step 4, were bad"):
        run_job(train_with_bad_steps, 2, str(tiny_config), words, (3, 4))


def train_on_a_full_disk(launch: Launch, path: str, words: list[str], full: tuple) -> None:
    """Train; rank 1 cannot write the checkpoints of the steps `full`."""
    write = save.write_tensors

    def fail(path: Path, tensors: Any) -> Any:
        if launch.rank == 1 and any(f"{step:08d}" in str(path) for step in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_tensors", fail)
        if 12 not in full:
            train_run(launch, path, words)
            return
        with pytest.raises(OSError, match=r"step 12 not saved: .*No space left"):
            train_run(launch, path, words)


# The save of step 12 waits for the one of step 8, so step 13 counts its failure at any speed.
@pytest.mark.parametrize(("full", "steps", "saved"), [((8,), 13, [4, 12, 13]), ((12,), 12, [4, 8])])
def test_training_continues_after_a_full_disk(
    run_job: Callable[..., list[Any]],
    tiny_config: Path,
    tmp_path: Path,
    full: tuple[int, ...],
    steps: int,
    saved: list[int],
) -> None:
    words = [f"output={tmp_path}", "training.batch_size=8", f"training.steps={steps}"]
    run_job(train_on_a_full_disk, 2, str(tiny_config), words, full)
    folder = tmp_path / "tiny"
    assert saved_steps(folder) == saved
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert latest.name == f"step-{saved[-1]:08d}"
    assert not list((folder / "checkpoints").glob(".*.partial"))
    lines = deterministic_metrics(folder)
    assert [line["step"] for line in lines] == list(range(steps + 1))[1:]
    counts = {line["checkpoints_not_saved"] for line in lines if "checkpoints_not_saved" in line}
    assert counts == ({1.0} if 8 in full else set())
