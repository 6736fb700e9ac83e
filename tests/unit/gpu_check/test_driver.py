"""The GPU check's driver: stages run part by part, resume and respect time limits."""

import signal
import threading

import pytest

from benchmarks.gpu_check.__main__ import INTERRUPTED, main, parser
from benchmarks.gpu_check.driver import Clock, run_stage
from benchmarks.gpu_check.results import Row, Settings, read_stage
from benchmarks.gpu_check.stages import open_stage
from megavis.config.errors import UserError
from megavis.parallel.workers import WorkerError

pytestmark = pytest.mark.once


class FakeWorker:
    """Return the given rows of each part, or raise its error."""

    def __init__(self, parts):
        self.parts, self.asked, self.timeouts, self.replaced = parts, [], [], 0

    def __call__(self, job, settings, number, name=None, *, timeout):
        self.timeouts.append(timeout)
        if job is open_stage:
            return {"torch": "2.11"}, tuple(self.parts)
        self.asked.append(name)
        found = self.parts[name]
        if isinstance(found, BaseException):
            raise found
        return found

    def replace(self):
        self.replaced += 1


@pytest.fixture
def settings(tmp_path):
    return Settings("cpu", True, tmp_path)


def run(settings, worker, clock=None, **options):
    lines = []
    options = {"clock": clock or Clock(60.0), "say": lines.append, **options}
    return run_stage(settings, 3, [worker], **options), lines


def test_only_failed_parts_are_repeated(settings):
    error = WorkerError("rank 0 raised:\nTraceback ...\nRuntimeError: out of memory")
    worker = FakeWorker({"a": [Row("x", 1)], "b": error, "c": [Row("y", False, passed=False)]})
    result, lines = run(settings, worker)
    assert worker.asked == ["a", "b", "c"]
    assert not result.finished
    assert result.parts["b"].error == "RuntimeError: out of memory"
    assert "Traceback" in result.parts["b"].trace
    assert [line.rpartition(" (")[0] for line in lines] == [
        "stage 3, a: 1 rows",
        "stage 3, b: RuntimeError: out of memory",
        "stage 3, c: 1 rows, not as it should be: y",
    ]
    again = FakeWorker({**worker.parts, "b": [Row("z", 2)]})
    result, _ = run(settings, again)
    assert again.asked == ["b"]
    assert result.finished
    assert result == read_stage(settings.folder, 3)
    assert [row.what for row in result.rows] == ["x", "z", "y"]


def test_finished_stage_is_skipped_unless_repeated(settings):
    worker = FakeWorker({"a": [Row("x", 1)]})
    run(settings, worker)
    _, lines = run(settings, worker)
    assert lines == ["stage 3, ZeRO stages: finished earlier"]
    assert worker.asked == ["a"]
    run(settings, worker, again=True)
    assert worker.asked == ["a", "a"]


def test_interruption_keeps_finished_parts(settings):
    worker = FakeWorker({"a": [Row("x", 1)], "b": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run(settings, worker)
    kept = read_stage(settings.folder, 3)
    assert list(kept.parts) == ["a"]
    assert not kept.finished


def test_stage_stops_at_the_time_limit(settings):
    times = iter([0.0, 0.0, 0.0, 0.0, 4.0, 4.0, 11.0])
    clock = Clock(10.0, now=lambda: next(times))
    worker = FakeWorker({"a": [Row("x", 1)], "b": [Row("y", 2)], "c": [Row("z", 3)]})
    result, _ = run(settings, worker, clock)
    assert worker.asked == ["a", "b"]
    assert worker.timeouts == [10.0, 10.0, 6.0]
    assert result.stopped == "time limit of 10 s"
    assert not read_stage(settings.folder, 3).finished
    run(settings, worker)
    assert worker.asked == ["a", "b", "c"]


def test_slow_part_is_stopped_and_reported(settings):
    """The part has one second, after which the worker gives up."""

    class Slow(FakeWorker):
        def __call__(self, job, *args, timeout):
            if job is open_stage:
                return {}, ("slow",)
            import time

            time.sleep(timeout)
            raise WorkerError(f"ranks [0] did not answer in {timeout} s")

    result, lines = run(settings, Slow({}), Clock(1.0))
    assert result.parts["slow"].error == "stopped by the time limit of 1 s"
    assert not result.finished
    assert lines[0].startswith("stage 3, slow: stopped by the time limit of 1 s")


def test_results_of_another_device_are_refused(settings):
    worker = FakeWorker({"a": [Row("x", 1)]})
    run(settings, worker)
    elsewhere = Settings("cuda", False, settings.folder)
    with pytest.raises(UserError, match="measured on cpu at tiny sizes; name another folder"):
        run(elsewhere, worker)
    run(elsewhere, worker, again=True)
    assert read_stage(settings.folder, 3).device == "cuda"


def test_workers_are_replaced_between_isolated_parts(tmp_path):
    worker = FakeWorker({"a": [], "b": []})
    on_gpu = Settings("cuda", False, tmp_path)
    run_stage(on_gpu, 5, [worker], clock=Clock(60.0), say=lambda line: None)
    assert worker.replaced == 3  # after each of two parts and after the stage
    run_stage(on_gpu, 3, [worker], clock=Clock(60.0), say=lambda line: None)
    assert worker.replaced == 4


class Meeting(FakeWorker):
    """Runs parts that wait for each other, and notes their folders."""

    barrier, folders = threading.Barrier(2), []

    def __call__(self, job, settings, number, name=None, *, timeout):
        if job is open_stage:
            return {}, ("a", "b", "c", "d")
        self.folders.append(settings.folder)
        self.barrier.wait(timeout=120)
        return [Row(name, 1)]


def test_parts_without_times_run_at_once(tmp_path):
    on_gpu = Settings("cuda", False, tmp_path)
    crew = [Meeting({}), Meeting({})]
    result = run_stage(on_gpu, 3, crew, clock=Clock(60.0), say=lambda line: None)
    assert result.finished
    assert [row.what for row in result.rows] == ["a", "b", "c", "d"]
    assert set(Meeting.folders) == {tmp_path, tmp_path / "jobs" / "1"}
    assert result == read_stage(tmp_path, 3)


def test_parts_with_times_never_do(tmp_path):
    crew = [FakeWorker({"a": [], "b": []}), FakeWorker({})]
    run_stage(Settings("cuda", False, tmp_path), 5, crew, clock=Clock(60.0), say=lambda line: None)
    assert (crew[0].asked, crew[1].asked) == (["a", "b"], [])


def test_stage_with_a_failed_worker_is_unfinished(settings):
    class Broken(FakeWorker):
        def __call__(self, *args, timeout):
            raise WorkerError("rank 0 raised:\nModuleNotFoundError: No module named 'deepspeed'")

    result, _ = run(settings, Broken({}))
    assert result.stopped == "ModuleNotFoundError: No module named 'deepspeed'"
    assert not result.finished


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_invalid_jobs_are_refused(text, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args([f"--jobs={text}"])
    assert end.value.code == 2
    assert "is no number of jobs; give for example 8" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "1,11", "one"])
def test_invalid_stages_are_refused(text, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--stages", text])
    assert end.value.code == 2
    assert "names no stages; give for example 1,3" in capsys.readouterr().err
    assert parser().parse_args(["--stages", "3,1"]).stages == [1, 3]


def test_zero_limit_is_refused(tmp_path, capsys):
    assert main(["--device", "cpu", "--out", str(tmp_path / "out"), "--limit", "0"]) == 2
    assert capsys.readouterr().err == "gpu_check: --limit and --total are minutes above 0\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_writes_the_report(number, tmp_path, monkeypatch, capsys):
    import benchmarks.gpu_check.__main__ as command

    def interrupted(settings, stage, worker, **options):
        signal.raise_signal(number)

    monkeypatch.setattr(command, "run_stage", interrupted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = signal.getsignal(number)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == INTERRUPTED
    assert "interrupted; the same command continues" in capsys.readouterr().out
    assert (tmp_path / "report.md").exists()
    assert signal.getsignal(number) is before
