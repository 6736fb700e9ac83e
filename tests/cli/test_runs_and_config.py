"""`megavis runs`, `config show`, `config diff`, `--quiet`, `--verbose` and shell completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from megavis.cli import main
from megavis.config.load import load_config
from megavis.data.format.folder_lock import FolderLock

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    """Write a run folder with metrics and the folders of checkpoints."""

    def write(name, metrics=(), checkpoints=()):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(tiny("{name: igpt}"))
        lines = "".join(json.dumps(record) + "\n" for record in metrics)
        (folder / "metrics.jsonl").write_text(lines)
        for step in checkpoints:
            (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        return folder

    return write


def test_runs_command(tmp_path, write, capsys):
    write("ended", [{"step": 0, "validation_loss": 3.5}, {"step": 3, "loss": 2.25}])
    write("stopped", [{"step": 1, "loss": 4.0}])
    for name, file in (("early", "early_stopping.json"), ("tuned", "finetune_test.json")):
        folder = write(name, [{"step": 2, "loss": 4.0}])
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / file).write_text('{"step": 1}')
    write("sweeps/imported", checkpoints=[7])
    with FolderLock(write("now", [{"step": 2, "loss": 3.0}])):
        assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    states = {name: (row["step"], row["state"]) for name, row in rows.items()}
    assert states == {
        "ended": (3, "finished"),
        "stopped": (1, "stopped"),
        "early": (2, "finished"),
        "tuned": (2, "finished"),
        "sweeps/imported": (7, "imported"),
        "now": (2, "training"),
    }
    assert (rows["ended"]["loss"], rows["ended"]["validation"]) == (2.25, 3.5)
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "paper", "step"]
    assert any(
        line.split()[:6] == ["ended", "igpt", "3/3", "2.25", "3.5", "finished"] for line in lines
    )


def test_config_files_of_other_tools_do_not_end_the_list(tmp_path, write, capsys):
    write("ours", [{"step": 3, "loss": 2.25}])
    for number, text in enumerate(("objective: regression", "training: 5", "training: {steps: x}")):
        folder = write(f"other-{number}", [{"step": 1, "loss": 4.0}])
        (folder / "config.yaml").write_text(text)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["ours"]["paper"], rows["ours"]["steps"]) == ("igpt", 3)
    others = [(row["paper"], row["steps"]) for name, row in rows.items() if name != "ours"]
    assert others == [("", None)] * 3
    assert main(["runs", str(tmp_path)]) == 0


def test_folder_without_runs(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.fixture
def based(tmp_path):
    """A config that is based on another one."""
    (tmp_path / "below.yaml").write_text(tiny("{name: igpt}"))
    above = tmp_path / "above.yaml"
    above.write_text("based_on: below.yaml\nname: above\noptimizer: {learning_rate: 5e-4}\n")
    return above


def test_config_show(based, capsys):
    words = ["config", "show", str(based), "training.steps=7"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    places = {}
    for line in shown.splitlines():
        value, _, place = line.partition("#")
        if place:
            places[value.strip()] = place.strip()
    assert places["name: above"] == f"{based}:2"
    assert places["hidden_size: 16"].startswith(str(based.parent / "below.yaml"))
    assert places["learning_rate: 0.0005"] == f"{based}:3"
    assert places["steps: 7"] == "command line"
    assert places["seed: 0"] == "default"
    # The output is a valid config.
    again = based.with_name("again.yaml")
    again.write_text(shown)
    assert load_config(again).config == load_config(based, ["training.steps=7"]).config


def test_config_diff(based, capsys):
    below = str(based.with_name("below.yaml"))
    assert main(["config", "diff", below, below]) == 0
    assert capsys.readouterr().out == ""
    assert main(["config", "diff", below, str(based)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "name: tiny → above",
        "optimizer.learning_rate: 0.01 → 0.0005",
    ]


def test_quiet_and_verbose_exclude_each_other(based, capsys):
    assert main(["--quiet", "config", "show", str(based), "--verbose"]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "says"), [("--quiet", False), ("--verbose", True)])
def test_quiet_and_verbose(option, says):
    """Run in a subprocess, since the options change the environment."""
    code = f"""
import sys, warnings
from megavis.cli import main
main(["config", "diff", "nowhere.yaml", "nowhere.yaml", "{option}"])
from tqdm import tqdm
for _ in tqdm(range(3), desc="a bar"): pass
from megavis.commands.terminal import quietly
with quietly(): print("output of a library")
"""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TQDM_MININTERVAL": "0"}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=settings, text=True, capture_output=True, check=True)
    assert ("a bar" in process.stderr) == says
    assert ("output of a library" in process.stdout) == says
    assert ("Traceback" in process.stderr) == says
    assert "error: nowhere.yaml: no such config file" in process.stderr


def test_shell_completion():
    pytest.importorskip("argcomplete", reason="pip install argcomplete, to complete in a shell")
    found = {}
    for line in ("megavis check", "megavis runs --j", "megavis checkpoint ver"):
        settings = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        command = [sys.executable, "-m", "megavis.cli"]
        process = subprocess.run(command, env=settings, text=True, capture_output=True)
        found[line] = process.stdout.strip()
    assert found == {
        "megavis check": "checkpoint",
        "megavis runs --j": "--json",
        "megavis checkpoint ver": "verify",
    }
