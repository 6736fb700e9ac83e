"""Slices of a job and a local Ray cluster write the bytes of one process."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from image_files import tree
from kill_sweep import write_images

from data_tools import letters
from data_tools.__main__ import main
from data_tools.out_lock import JobSlice


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A command that writes seven shards, and the files of one process."""
    folder = tmp_path_factory.mktemp("engines")
    words = write_images(folder, count=52)
    assert main([*words, "--out", str(folder / "whole")]) == 0
    return words, tree(folder / "whole")


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_slices_equal_one_process(order, command, tmp_path, capsys):
    words, whole = command
    out = tmp_path / "out"
    for number in order:
        assert not (out / "manifest.json").exists()
        assert main([*words, "--out", str(out), "--slice", f"{number}/3"]) == 0
    assert capsys.readouterr().out.count("the folder is finished when all slices are") == 2
    assert tree(out) == whole


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/3"])
def test_invalid_slices(text):
    with pytest.raises(argparse.ArgumentTypeError, match="i/n"):
        JobSlice.parse(text)


def test_processes_that_cannot_start(command, tmp_path, capsys, monkeypatch):
    """As where a machine has as many processes as a user may have."""
    submit, taken = ProcessPoolExecutor.submit, []

    def limited(*arguments):
        taken.append(arguments)
        if len(taken) > 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return submit(*arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", limited)
    words = [*command[0], "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 1
    assert "error: Resource temporarily unavailable" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(words) == 0
    assert tree(tmp_path / "out") == command[1]


class Kill:
    """What ends the process that unpickles it, as the kernel does where memory is short."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_killed_worker_that_draws_letters(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(letters, "_recipe", lambda arguments: recipe)
    recipe = letters.LetterRecipe(8, "AB", (85, 92), "eight", "none", 0)
    object.__setattr__(recipe, "seed", Kill())
    monkeypatch.setattr(letters, "_record", lambda recipe, counts: {})
    words = ["letters", str(tmp_path / "out"), "--images", "4", "--workers", "1"]
    assert main(words) == 1
    assert "error: a worker process was killed (out of memory?)" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'megavis[ray]' (240 MB, not a test dependency)",
)
def test_local_ray(command, tmp_path):
    """In a process of its own: Ray changes signals, hooks and the environment of one."""
    words, whole = command
    out = tmp_path / "out"
    on_ray = [sys.executable, "-m", "data_tools", *words, "--out", str(out), "--engine", "ray"]
    made = subprocess.run(on_ray, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert tree(out) == whole
    refused = subprocess.run([*on_ray, "--seed", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "error: " in refused.stderr
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_shared_memory_that_cannot_be_written(number, command, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    importlib.import_module("multiprocessing.synchronize")  # it needs what is replaced here
    monkeypatch.setattr("_multiprocessing.SemLock", refuse)
    assert main([*command[0], "--out", str(tmp_path / "out"), "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert f"/dev/shm: {os.strerror(number)}" in error
    assert "--workers 0" in error
    assert error.count("\n") == 1
