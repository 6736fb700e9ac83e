"""launch/demo.sh with stub programs, and the gallery and seed tables on handwritten runs."""

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from made_results import made_probe, write_results

from data_tools.__main__ import build_parser
from megavis.cli import read_arguments
from megavis.config.errors import UserError

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAPERS = re.search(r"^papers=\((.*)\)$", (ROOT / "launch/demo.sh").read_text(), re.MULTILINE)[1]

TOKENIZERS = ("demo_vae", "demo_vqgan")


def of_tokenizer(text):
    return any(name in text for name in TOKENIZERS)


@pytest.fixture
def demo(tmp_path):
    """Return a function that runs the script in a temporary folder with stub programs."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/demo.sh", tmp_path / "launch")
    (tmp_path / "bin").mkdir()

    def run(*words, fails_on="nothing", **variables):
        for name in ("python", "megavis"):
            path = tmp_path / "bin" / name
            fail = f'[[ "$*" != *{fails_on}* ]] || {{ echo "error: no disk"; exit 3; }}'
            path.write_text(f"#!/bin/bash\necho {name} speaks\n{fail}\n")
            path.chmod(0o755)
        command = ["bash", tmp_path / "launch/demo.sh", *words]
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **variables}
        return subprocess.run(command, env=environment, text=True, capture_output=True)

    return run


@pytest.mark.parametrize("paper", PAPERS.split())
def test_demo_steps_and_commands_are_valid(demo, tmp_path, paper):
    process = demo(paper)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    steps = [line for line in lines if line.startswith("[")]
    total = len(steps)
    assert [line.split()[0] for line in steps] == [f"[{n}/{total}]" for n in range(1, total + 1)]
    assert lines[0].endswith(f"are in demo/{paper}.log")
    log = (tmp_path / "demo" / f"{paper}.log").read_text()
    commands = re.findall(r"^\$ (.*)$", log, re.MULTILINE)
    assert len(commands) == total
    for command in commands:
        words = shlex.split(command)
        if words[0] == "megavis":
            assert read_arguments(words[1:]).run
            configs = [word for word in words if word.endswith(".yaml")]
            assert all((ROOT / config).exists() for config in configs)
        elif words[2] == "data_tools":
            assert build_parser().parse_args(words[3:]).run
        else:
            assert importlib.util.find_spec(words[2])
    # The last command prints the results.
    assert lines[-2] == "megavis speaks"
    assert lines[-1].strip().startswith("took")


@pytest.mark.parametrize("paper", PAPERS.split())
def test_seed_gives_separate_runs(demo, tmp_path, paper):
    process = demo(paper, SEED="3")
    assert process.returncode == 0, process.stderr
    log = (tmp_path / "demo" / f"{paper}_3.log").read_text()
    trained = [line for line in log.splitlines() if re.search("megavis (train|finetune)", line)]
    names = {re.search(r" name=(\w+)", line)[1] for line in trained if not of_tokenizer(line)}
    assert names
    assert all(name.endswith("_3") for name in names)
    assert all("seed=3" in line for line in trained if not of_tokenizer(line))
    # Only runs of this seed are opened; tokenizers belong to the data.
    opened = set(re.findall(r"runs/(\w+)", log))
    assert {name for name in opened if not of_tokenizer(name)} <= names


def test_all_runs_every_paper_and_the_gallery(demo):
    process = demo("all")
    assert process.returncode == 0, process.stderr
    assert all(f"demo/{paper}.log" in process.stdout for paper in PAPERS.split())
    assert process.stdout.splitlines()[-1] == "python speaks"


def test_failing_step_ends_the_demo_with_its_log(demo):
    process = demo(fails_on="train")
    assert process.returncode == 3
    assert "ended with exit code 3; the end of demo/igpt.log" in process.stderr
    assert process.stderr.splitlines()[-1] == "error: no disk"
    assert "took" not in process.stdout


def test_failing_background_step_ends_the_demo(demo):
    process = demo("mp3", SEED="3", fails_on="name=mp3_finetune_demo_3")
    assert process.returncode == 3
    command = "megavis finetune yaml_configs/mp3/finetune_demo.yaml seed=3"
    assert f"ended with exit code 3; the end of demo/mp3_3.log:\n$ {command} " in process.stderr
    assert process.stderr.splitlines()[-1] == "error: no disk"
    assert "took" not in process.stdout


def test_unknown_paper_is_refused(demo):
    process = demo("vit")
    assert process.returncode == 2
    assert process.stderr == (f"usage: bash launch/demo.sh [PAPER], PAPER one of: {PAPERS} all\n")


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/scripts"))
    return importlib.import_module("gallery")


@pytest.fixture
def seeds(gallery):
    return importlib.import_module("seeds")


def write_probed(runs, seed, trained, steps=7):
    """Write a run of iGPT's demo and its probe result."""
    name = f"igpt_demo_{seed}" if seed else "igpt_demo"
    (runs / name / "evaluation").mkdir(parents=True)
    training = f"training: {{steps: {steps}, batch_size: 8}}"
    (runs / name / "config.yaml").write_text(f"name: {name}\nseed: {seed}\n{training}\n")
    record = {"step": 7, "validation_loss": 1.25}
    (runs / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    write_results(runs / name, probe=made_probe(trained, 0.125, 0.25))


def test_gallery_shows_existing_runs(gallery, tmp_path, capsys):
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    docs.mkdir()
    assert gallery.main(runs, docs) == 1
    for name in gallery.DEMOS[0].runs:
        (runs / name / "samples").mkdir(parents=True)
        record = {"step": 7, "loss": 1.25}
        (runs / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        for step in (3, 7):
            (runs / name / "samples" / f"completions-{step:08d}.png").write_bytes(bytes([step]))
    assert gallery.main(runs, docs) == 0
    assert f"1 of {len(gallery.DEMOS)} demos" in capsys.readouterr().out
    page = (docs / "gallery.md").read_text()
    assert "make demo PAPER=igpt" in page
    assert "training loss     1.2500 before, 1.2500 after" in page
    assert str(tmp_path) not in page
    (picture,) = re.findall(r"\]\((.*)\)", page)
    assert (docs / picture).read_bytes() == bytes([7])


def test_gallery_and_script_have_the_same_demos(gallery):
    assert [entry.paper for entry in gallery.DEMOS] == PAPERS.split()


def test_seed_table_shows_mean_and_deviation(seeds, tmp_path, capsys):
    runs, page = tmp_path / "runs", tmp_path / "seeds.md"
    words = ["--runs", str(runs), "--out", str(page)]
    assert seeds.main(words) == 1
    assert "holds no run of a demo" in capsys.readouterr().err
    for seed, accuracy in ((0, 0.3), (1, 0.34), (2, 0.35)):
        write_probed(runs, seed, accuracy)
    # A run of another demo with the same name prefix.
    write_probed(runs, "bert", 0.9)
    assert seeds.main(words) == 0
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines()]
    # ((0.3 - 0.33)² + (0.34 - 0.33)² + (0.35 - 0.33)²) / 2 = 0.0007, whose root is 0.0265.
    each = ["30.0%", "34.0%", "35.0%"]
    assert ["linear probe, trained", "33.0 ± 2.6%", *each] in rows
    apart = ["5.0%", "9.0%", "10.0%"]
    assert ["linear probe, trained − raw pixels", "8.0 ± 2.6%", *apart] in rows
    assert ["validation loss", "1.25 ± 0.00", "1.25", "1.25", "1.25"] in rows


def test_results_of_another_form_are_refused(seeds, gallery, tmp_path, capsys):
    runs, page = tmp_path / "runs", tmp_path / "seeds.md"
    write_probed(runs, 0, 0.3)
    path = runs / "igpt_demo" / "evaluation" / "probe.json"
    path.write_text(path.read_text().replace('"pixels"', '"colours"'))
    message = f"{path} is not a result of `megavis probe`: `pixels` is missing"
    assert seeds.main(["--runs", str(runs), "--out", str(page)]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="`pixels` is missing"):
        gallery.main(runs, tmp_path)


def test_seeds_of_different_recipes_are_refused(seeds, tmp_path, capsys):
    runs, page = tmp_path / "runs", tmp_path / "seeds.md"
    write_probed(runs, 0, 0.3)
    write_probed(runs, 1, 0.3, steps=8)
    assert seeds.main(["--runs", str(runs), "--out", str(page)]) == 2
    assert "igpt_demo differ in training.steps" in capsys.readouterr().err
    assert not page.exists()
