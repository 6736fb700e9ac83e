"""Two commands on one `--out`: the second is refused, unless each writes its own slice."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time

import pytest
from image_files import tree
from kill_sweep import spawned, stop, write_images

from data_tools.__main__ import main
from data_tools.out_lock import JobSlice, hold_out
from megavis.config.errors import GIVEN_UP_EXIT_CODE, UserError
from megavis.data.format import folder_lock
from megavis.data.format.folder_lock import FolderLock

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), count=32)


def test_the_second_command_is_refused(words, tmp_path, capsys):
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [*words, "--out", str(out)]
    assert main([*words, "--out", str(whole)]) == 0
    first = spawned(command)
    try:
        while not list(out.glob(".lock-*")):
            assert os.waitpid(first, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        os.kill(first, signal.SIGSTOP)
        before = tree(out)
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(rf"{out}: another data_tools writes .* \(process {first} on ", error)
        assert tree(out) == before
        os.kill(first, signal.SIGCONT)
        assert os.waitpid(first, 0)[1] == 0
    finally:
        stop(first)
    assert tree(out) == tree(whole)
    assert main(command) == 0


def test_a_killed_command_holds_nothing(words, tmp_path):
    out = tmp_path / "out"
    first = spawned([*words, "--out", str(out)])
    while not list(out.glob(".lock-*")):
        time.sleep(0.001)
    stop(first)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # it is a zombie until waited for
    assert main([*words, "--out", str(out)]) == 0
    os.waitpid(first, 0)
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("held", "asked", "refused"),
    [
        ("1/1", "1/2", True),
        ("1/2", "1/1", True),
        ("1/2", "1/2", True),
        ("1/2", "2/2", False),
        ("1/2", "2/3", True),
        ("11/12", "1/12", False),
    ],
)
def test_slices_share_a_folder(held, asked, refused, tmp_path):
    with hold_out(tmp_path, JobSlice.parse(held)):
        if refused:
            with pytest.raises(UserError, match="another data_tools writes"):
                hold_out(tmp_path, JobSlice.parse(asked)).__enter__()
        else:
            with hold_out(tmp_path, JobSlice.parse(asked)):
                pass
    assert not list(tmp_path.iterdir())


def hold_with_fast_beats(folder, is_held):
    folder_lock.BEAT_SECONDS = 0.05
    with hold_out(folder, JobSlice()):
        is_held.set()
        time.sleep(600)


def test_a_command_that_was_replaced_ends(tmp_path, capfd):
    """As in training, but for the words: what a shard folder holds is saved."""
    spawn = multiprocessing.get_context("spawn")
    is_held = spawn.Event()
    process = spawn.Process(target=hold_with_fast_beats, args=(tmp_path, is_held))
    process.start()
    assert is_held.wait(120)
    other = json.loads((tmp_path / ".lock-1").read_text()) | {"token": "another"}
    (tmp_path / ".lock-2").write_text(json.dumps(other))
    (tmp_path / ".lock-1").unlink()
    process.join(60)
    assert process.exitcode == GIVEN_UP_EXIT_CODE == 72
    said = capfd.readouterr().err
    assert re.search(r"taken over by process \d+ on .*; this job ends\n$", said)


def test_a_folder_of_drawn_images_is_written_once(tmp_path, capsys):
    words = ["letters", str(tmp_path / "demo"), "--images", "26", "--selection-images", "26"]
    with FolderLock(tmp_path, name="demo"):
        assert main([*words, "--validation-images", "26"]) == 2
    assert "another data_tools writes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*words, "--validation-images", "26"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
