"""Stages are measured part by part, resume, and keep to their time."""

import signal

import pytest

from benchmarks.gpu_check.__main__ import INTERRUPTED, main, parser
from benchmarks.gpu_check.driver import Clock, run_stage
from benchmarks.gpu_check.results import Row, Settings, read_stage
from benchmarks.gpu_check.stages import open_stage
from megavis.config.errors import UserError
from megavis.parallel.workers import WorkerError

pytestmark = pytest.mark.once


class FakeWorker:
    """Measures in no time what a table says: rows, or an error that is raised."""

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
    said = []
    options = {"clock": clock or Clock(60.0), "say": said.append, **options}
    return run_stage(settings, 3, worker, **options), said


def test_parts_that_failed_are_measured_again_and_no_others(settings):
    error = WorkerError("rank 0 raised:\nTraceback ...\nRuntimeError: out of memory")
    worker = FakeWorker({"a": [Row("x", 1)], "b": error, "c": [Row("y", False, passed=False)]})
    result, said = run(settings, worker)
    assert worker.asked == ["a", "b", "c"]
    assert not result.finished
    assert result.parts["b"].error == "RuntimeError: out of memory"
    assert "Traceback" in result.parts["b"].trace
    assert [line.rpartition(" (")[0] for line in said] == [
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


def test_a_finished_stage_is_skipped_unless_asked_for_again(settings):
    worker = FakeWorker({"a": [Row("x", 1)]})
    run(settings, worker)
    _, said = run(settings, worker)
    assert said == ["stage 3, ZeRO stages: finished earlier"]
    assert worker.asked == ["a"]
    run(settings, worker, again=True)
    assert worker.asked == ["a", "a"]


def test_an_interruption_keeps_the_parts_before_it(settings):
    worker = FakeWorker({"a": [Row("x", 1)], "b": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run(settings, worker)
    kept = read_stage(settings.folder, 3)
    assert list(kept.parts) == ["a"]
    assert not kept.finished


def test_a_stage_stops_between_parts_when_its_time_is_over(settings):
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


def test_a_part_that_takes_too_long_is_ended_and_said(settings):
    """The clock is past its end, so the part has a second; the worker gives up after it."""

    class Slow(FakeWorker):
        def __call__(self, job, *args, timeout):
            if job is open_stage:
                return {}, ("slow",)
            import time

            time.sleep(timeout)
            raise WorkerError(f"ranks [0] did not answer in {timeout} s")

    result, said = run(settings, Slow({}), Clock(1.0))
    assert result.parts["slow"].error == "stopped by the time limit of 1 s"
    assert not result.finished
    assert said[0].startswith("stage 3, slow: stopped by the time limit of 1 s")


def test_what_was_measured_elsewhere_is_not_mixed_in(settings):
    worker = FakeWorker({"a": [Row("x", 1)]})
    run(settings, worker)
    elsewhere = Settings("cuda", False, settings.folder)
    with pytest.raises(UserError, match="measured on cpu at tiny sizes; name another folder"):
        run(elsewhere, worker)
    run(elsewhere, worker, again=True)
    assert read_stage(settings.folder, 3).device == "cuda"


def test_processes_are_replaced_on_a_gpu_where_parts_want_their_own(tmp_path):
    worker = FakeWorker({"a": [], "b": []})
    on_gpu = Settings("cuda", False, tmp_path)
    run_stage(on_gpu, 5, worker, clock=Clock(60.0), say=lambda line: None)
    assert worker.replaced == 3  # after each of two parts, and after the stage
    run_stage(on_gpu, 3, worker, clock=Clock(60.0), say=lambda line: None)
    assert worker.replaced == 4


def test_a_stage_whose_process_does_not_start_is_unfinished(settings):
    class Broken(FakeWorker):
        def __call__(self, *args, timeout):
            raise WorkerError("rank 0 raised:\nModuleNotFoundError: No module named 'deepspeed'")

    result, _ = run(settings, Broken({}))
    assert result.stopped == "ModuleNotFoundError: No module named 'deepspeed'"
    assert not result.finished


@pytest.mark.parametrize("text", ["", "0", "1,9", "one"])
def test_stages_that_are_none_are_refused(text, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--stages", text])
    assert end.value.code == 2
    assert "names no stages; give for example 1,3" in capsys.readouterr().err
    assert parser().parse_args(["--stages", "3,1"]).stages == [1, 3]


def test_a_limit_that_is_none_is_one_sentence(tmp_path, capsys):
    assert main(["--device", "cpu", "--out", str(tmp_path / "out"), "--limit", "0"]) == 2
    assert capsys.readouterr().err == "gpu_check: --limit and --total are minutes above 0\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_call_with_a_report(number, tmp_path, monkeypatch, capsys):
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
