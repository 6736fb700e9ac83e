"""The run lock admits one job per run folder; tested with real processes and stale locks."""

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from megavis.config.errors import UserError
from megavis.data.format import folder_lock
from megavis.data.format.folder_lock import FolderLock, Holder, holder_of

pytestmark = pytest.mark.once

SPAWN = multiprocessing.get_context("spawn")


def hold(folder, is_held):
    with FolderLock(folder):
        is_held.set()
        time.sleep(600)


@pytest.fixture
def other(tmp_path):
    """Start a process that holds the run folder until it is killed."""
    is_held = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path / "run", is_held))
    process.start()
    assert is_held.wait(120)
    yield process
    process.kill()
    process.join()


@pytest.fixture
def short(monkeypatch):
    """Shorten the time after which a silent holder counts as dead."""
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(folder_lock, "_LOOK_SECONDS", 0.05)


def write_lock(folder, *, number=1, **changed):
    """Write the lock file of another holder."""
    folder.mkdir(exist_ok=True)
    content = {**vars(Holder.of_this_process()), **changed}
    path = folder / f".lock-{number}"
    path.write_text(json.dumps(content))
    return path


def locks(folder):
    return sorted(path.name for path in folder.glob(".*"))


def test_second_process_is_refused(other, tmp_path):
    words = rf"run: another job trains .* \(process {other.pid} on {socket.gethostname()} since 20"
    with pytest.raises(UserError, match=words) as refused, FolderLock(tmp_path / "run"):
        pass
    assert "\n" not in str(refused.value)
    assert locks(tmp_path / "run") == [".lock-1"], "the holder's lock must be untouched"


def test_stopped_process_still_holds_the_lock(other, tmp_path):
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match="another job"), FolderLock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("is_reaped", [True, False])
def test_killed_holder_is_replaced_immediately(other, tmp_path, is_reaped):
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie until joined
    if is_reaped:
        other.join()
    begin = time.monotonic()
    with FolderLock(tmp_path / "run"):
        assert time.monotonic() - begin < folder_lock.SILENCE_SECONDS / 2
        assert locks(tmp_path / "run") == [".lock-2"]
    assert locks(tmp_path / "run") == []


def test_reused_process_id_is_detected(tmp_path):
    me = Holder.of_this_process()
    write_lock(tmp_path, process=os.getpid(), started=me.started - 1)
    with FolderLock(tmp_path):
        assert locks(tmp_path) == [".lock-2"]


def test_silent_remote_holder_is_replaced(tmp_path, short, capsys):
    write_lock(tmp_path, host="elsewhere", number=7)
    begin = time.monotonic()
    with FolderLock(tmp_path):
        assert time.monotonic() - begin >= 3
        assert locks(tmp_path) == [".lock-8"]
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"{tmp_path}: held by process {os.getpid()} on elsewhere since")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("place", [{"host": "elsewhere"}, {"machine": "another boot"}])
def test_live_remote_holder_keeps_the_lock(tmp_path, short, place):
    path = write_lock(tmp_path, **place)

    def beat():
        time.sleep(0.3)
        # The remote clock is behind: only a change of the time stamp counts.
        os.utime(path, (time.time() - 900, time.time() - 900))

    process = multiprocessing.get_context("fork").Process(target=beat)
    process.start()
    with pytest.raises(UserError, match="another job"), FolderLock(tmp_path):
        pass
    process.join()
    assert locks(tmp_path) == [".lock-1"]


def test_long_dead_holder_is_replaced_without_waiting(tmp_path, capsys):
    path = write_lock(tmp_path, host="elsewhere")
    os.utime(path, (0, time.time() - 2 * folder_lock.LONG_DEAD_SECONDS))
    with FolderLock(tmp_path):
        assert locks(tmp_path) == [".lock-2"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ahead", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize(("silent", "is_live"), [(0.0, True), (90.0, False)])
def test_life_of_a_remote_holder_is_judged_by_the_clock_of_the_disk(
    tmp_path, monkeypatch, ahead, silent, is_live
):
    """This host's clock may differ: `runs` would call a run stopped, and slices overwrite it."""
    path, now = write_lock(tmp_path, host="elsewhere"), time.time()
    os.utime(path, (now - silent, now - silent))
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    assert (holder_of(tmp_path) is not None) is is_live
    assert locks(tmp_path) == [".lock-1"]


@pytest.mark.parametrize(("silent", "is_live"), [(0.0, True), (90.0, False)])
def test_holder_of_a_folder_that_may_only_be_read(tmp_path, monkeypatch, silent, is_live):
    path, now = write_lock(tmp_path, host="elsewhere"), time.time()
    os.utime(path, (now - silent, now - silent))

    def refuse(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    assert (holder_of(tmp_path) is not None) is is_live


def test_truncated_lock_is_replaced(tmp_path, short):
    (tmp_path / ".lock-1").write_text('{"host": "els')
    with FolderLock(tmp_path):
        assert locks(tmp_path) == [".lock-2"]


def test_patience_waits_for_the_previous_process(other, tmp_path):
    os.kill(other.pid, signal.SIGSTOP)
    helper = SPAWN.Process(target=kill_later, args=(other.pid,))
    helper.start()
    with FolderLock(tmp_path / "run", patience=60):
        assert locks(tmp_path / "run") == [".lock-2"]
    helper.join()


def kill_later(process):
    time.sleep(1)
    os.kill(process, signal.SIGKILL)


def test_holder_updates_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    with FolderLock(tmp_path):
        first = (tmp_path / ".lock-1").stat().st_mtime_ns
        time.sleep(0.5)
        assert (tmp_path / ".lock-1").stat().st_mtime_ns > first


def hold_with_fast_beats(folder, is_held):
    folder_lock.BEAT_SECONDS = 0.05
    hold(folder, is_held)


def test_replaced_holder_exits(tmp_path, capfd):
    is_held = SPAWN.Event()
    process = SPAWN.Process(target=hold_with_fast_beats, args=(tmp_path, is_held))
    process.start()
    assert is_held.wait(120)
    write_lock(tmp_path, number=2, host="elsewhere")
    (tmp_path / ".lock-1").unlink()
    process.join(60)
    assert process.exitcode == folder_lock.GIVEN_UP_EXIT_CODE
    said = capfd.readouterr().err
    assert "taken over by process" in said
    assert said.endswith("; this job ends without saving\n")
    assert locks(tmp_path) == [".lock-2"]


def hold_with_a_full_log(folder, is_held):
    with open("/dev/full", "w", buffering=1) as log, contextlib.redirect_stderr(log):
        hold_with_fast_beats(folder, is_held)


def test_a_holder_that_cannot_say_so_leaves_too(tmp_path):
    is_held = SPAWN.Event()
    process = SPAWN.Process(target=hold_with_a_full_log, args=(tmp_path, is_held))
    process.start()
    assert is_held.wait(120)
    write_lock(tmp_path, number=2, host="elsewhere")
    (tmp_path / ".lock-1").unlink()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == folder_lock.GIVEN_UP_EXIT_CODE


def hold_with_short_patience(folder, is_held):
    folder_lock.SILENCE_SECONDS = 1.0
    hold_with_fast_beats(folder, is_held)


@pytest.mark.parametrize("part", [".", "run/.lock-1"])
def test_holder_outlasts_a_folder_that_is_gone_for_a_moment(tmp_path, capfd, part):
    """As when a network disk is unmounted and mounted again."""
    run, is_held = tmp_path / "disk" / "run", SPAWN.Event()
    process = SPAWN.Process(target=hold_with_fast_beats, args=(run, is_held))
    process.start()
    assert is_held.wait(120)
    gone = tmp_path / "disk" / part
    gone.rename(tmp_path / "unmounted")
    process.join(0.5)
    assert process.exitcode is None
    assert not gone.exists()
    (tmp_path / "unmounted").rename(gone)
    process.join(0.3)
    assert process.exitcode is None
    process.kill()
    process.join()
    assert capfd.readouterr().err == ""


def test_holder_whose_folder_stays_away_fails_as_a_machine_does(tmp_path, capfd):
    run, is_held = tmp_path / "run", SPAWN.Event()
    process = SPAWN.Process(target=hold_with_short_patience, args=(run, is_held))
    process.start()
    assert is_held.wait(120)
    run.rename(tmp_path / "unmounted")
    process.join(60)
    assert process.exitcode == folder_lock.GONE_EXIT_CODE == 1
    assert "run/.lock-1: missing for 1 s on" in capfd.readouterr().err
    assert not run.exists()


def compete(folder, gate, results, all_have_tried):
    gate.wait()
    try:
        with FolderLock(folder):
            results.put(True)
            all_have_tried.wait(120)
    except UserError:
        results.put(False)


def test_one_of_several_processes_takes_over(tmp_path):
    write_lock(tmp_path, started=1)
    shared = (SPAWN.Barrier(4), SPAWN.Queue(), SPAWN.Event())
    processes = [SPAWN.Process(target=compete, args=(tmp_path, *shared)) for _ in range(4)]
    for process in processes:
        process.start()
    won = [shared[1].get(timeout=120) for _ in processes]
    shared[2].set()
    for process in processes:
        process.join()
    assert sorted(won) == [False, False, False, True]
    assert locks(tmp_path) == []


def test_unwritable_run_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run: the run folder cannot be written: Not a dir"):
        FolderLock(tmp_path / "file" / "run").__enter__()
