"""Paths of results and names of runs are checked before a command works."""

import errno
import os

import pytest

from data_tools.__main__ import main as data_tools
from megavis.cli import main

pytestmark = pytest.mark.once

WRITERS = [
    ["parity", "CONFIG", "--processes", "1", "--json"],
    ["plan", "CONFIG", "--gpus", "1", "--write"],
    ["bench", "CONFIG", "--profile"],
    ["ensemble", "runs/none", "--json"],
]


@pytest.mark.parametrize("words", WRITERS, ids=lambda words: words[0])
def test_results_need_a_folder(tmp_path, capsys, words):
    assert main([*words, "/proc/result"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words[-1]}: /proc/result: nothing can be written there")
    missing = tmp_path / "mistyped" / "result"
    assert main([*words, str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"error: {words[-1]}: there is no folder {missing.parent}; create it, or name another\n"
    )
    assert main([*words, str(tmp_path)]) == 2
    assert f"{words[-1]}: {tmp_path} is a folder; name a file" in capsys.readouterr().err


CREATORS = [
    (main, ["sample", "runs/none", "--out"]),
    (main, ["sample", "runs/none", "--npz"]),
    (main, ["probe", "runs/none", "--out"]),
    (main, ["likelihood", "runs/none", "--out"]),
    (main, ["evaluate", "segmentation", "runs/none", "--out"]),
    (main, ["evaluate", "detection", "runs/none", "--out"]),
    (main, ["evaluate", "reconstruction", "runs/none", "--out"]),
    (main, ["evaluate", "panoptic", "runs/none", "--out"]),
    (main, ["evaluate", "classes", "x.npz", "--train", "shards", "--images", "shards", "--out"]),
    (main, ["report", "runs/none", "--html"]),
    (main, ["evaluate", "samples", "x.npz", "--reference", "y.npz", "--out"]),
    (main, ["evaluate", "statistics", "images", "--out"]),
    (data_tools, ["palette", "fit", "images", "--out"]),
    (data_tools, ["inspect", "shards", "--out"]),
]


@pytest.mark.parametrize("words", [["jpeg", "images"], ["filter", "images"], ["speech", "words"]])
def test_shards_need_a_folder(tmp_path, capsys, words):
    (tmp_path / "out").touch()
    assert data_tools([*words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"--out: {tmp_path}/out is a file; name a folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["jpeg", "images"], ["speech", "words"]])
def test_shards_need_a_name_that_disks_take(tmp_path, capsys, monkeypatch, words):
    long = tmp_path / ("o" * 300)
    assert data_tools([*words, "--out", str(long)]) == 2
    expected = f"--out: {long}: File name too long; name a folder that can be written"
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1

    def fail(number):
        def exists(_):
            raise OSError(number, os.strerror(number), "out")

        monkeypatch.setattr("pathlib.Path.exists", exists)
        return data_tools([*words, "--out", "out"])

    assert fail(errno.EACCES) == 2
    assert "--out: out: Permission denied; name a folder" in capsys.readouterr().err
    assert fail(errno.ESTALE) == 1
    assert "Stale file handle: out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words"), CREATORS, ids=[" ".join(words) for _, words in CREATORS]
)
def test_results_need_a_writable_path(tmp_path, capsys, program, words):
    def error_with(path):
        assert program([*words, str(path)]) == 2
        return capsys.readouterr().err

    assert f"{words[-1]}: {tmp_path} is a folder; name a file;" in error_with(tmp_path)
    (tmp_path / "file").touch()
    assert "which is not a folder" in error_with(tmp_path / "file" / "result")
    # The root user has every right in /proc, and can write nothing.
    message = "/proc/new/result: nothing can be written there (No such file or directory); choose"
    assert message in error_with("/proc/new/result")
    long = tmp_path / "new" / ("o" * 300)
    assert f"{long}: nothing can be written there (File name too long)" in error_with(long)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["sample"], "name another place with --out"),
        (["probe"], "name another place with --out"),
        (["figure", "patches"], "name another place with --out"),
        (["evaluate", "reconstruction"], "name another place with --out"),
        (["evaluate", "depth"], "name another place with --out"),
        (["features", "--clear"], "copy the run"),
    ],
)
def test_results_need_a_writable_run(capsys, words, way):
    assert main([*words, "/proc"]) == 2
    assert capsys.readouterr().err == (
        "error: /proc: nothing can be written there (No such file or directory), and the results"
        f" go there; {way}\n"
    )


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["samples", "--reference", "absent.npz"], "evaluation"),
        (["classes", "--train", "absent", "--images", "absent"], "classes"),
    ],
)
def test_default_places_are_checked_before_the_work(capsys, words, kind):
    """Results lie next to the samples, here in a folder of the system."""
    assert main(["evaluate", words[0], "/proc/self/cwd", *words[1:], "--device", "cpu"]) == 2
    written = f"/proc/self/cwd.{kind}.json"
    assert f"error: {written}: nothing can be written there" in capsys.readouterr().err


def test_result_of_detection_is_no_picture(tmp_path, capsys):
    """The picture is written next to it, with the same name."""
    words = ["evaluate", "detection", str(tmp_path), "--out", str(tmp_path / "found.png")]
    assert main(words) == 2
    assert "found.png: the name of the file must end in .json" in capsys.readouterr().err


def test_missing_permission_is_one_line(tmp_path, capsys, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("megavis.commands.report.Path.is_dir", refused)
    assert main(["runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Permission denied\n"


def test_disk_that_turns_read_only_is_no_mistake_of_the_user(tiny_config, monkeypatch):
    """Launchers end a run at code 2, and start it again at others."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "runs/a/metrics.jsonl")

    monkeypatch.setattr("megavis.commands.train.run_training", refused)
    with pytest.raises(OSError, match="Read-only"):
        main(["train", str(tiny_config)])


@pytest.mark.parametrize("form", ["huggingface", "givt-vae"])
def test_imported_runs_need_a_valid_name(tmp_path, capsys, form):
    target = tmp_path / "vit base"
    assert main(["import", form, str(tmp_path / "source"), str(target)]) == 2
    error = capsys.readouterr().err
    assert f"error: {target}: a run's name has only letters" in error
    assert "'vit base' does not" in error
    assert not target.exists()
