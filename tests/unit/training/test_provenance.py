"""Records of starts and commands in a run folder."""

import pytest

from megavis.cli import _record, main
from megavis.training.provenance import command_line, read_commands, read_starts, record_start

pytestmark = pytest.mark.once


def test_each_start_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/megavis", "train", "a b.yaml", "seed=1"])
    for step in (0, 40):
        record_start(tmp_path, step, processes=2, device="cpu")
    (tmp_path / "starts.jsonl").open("a").write('{"time": "torn')
    first, second = read_starts(tmp_path)
    assert first["command"] == "megavis train 'a b.yaml' seed=1"
    assert (first["first_step"], second["first_step"]) == (0, 40)
    assert first["processes"] == 2
    assert {"python", "megavis", "torch"} <= set(first["versions"])


def test_a_line_cut_off_by_a_full_disk_spoils_no_later_one(tmp_path):
    record_start(tmp_path, 0, device="cpu")
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T00:00:00+00:00", "command": "megavis tr')
    for step in (40, 80):
        record_start(tmp_path, step, device="cpu")
    assert [start["first_step"] for start in read_starts(tmp_path)] == [0, 40, 80]


def test_command_line_replaces_the_module_path():
    assert command_line(["/x/megavis/cli.py", "probe", "runs/a"]) == "megavis probe runs/a"


def test_failed_commands_are_not_recorded(tmp_path, capsys):
    assert main(["probe", str(tmp_path)]) == 2
    assert read_commands(tmp_path) == []


def test_unwritable_folder_is_ignored(tmp_path):
    from argparse import Namespace

    folders = [tmp_path, tmp_path / "absent"]
    _record(Namespace(run_folders=folders), ["figure", "depth", str(tmp_path)])
    assert read_commands(tmp_path)[0]["command"] == f"megavis figure depth {tmp_path}"
