"""Project metadata, CI, containers and constraints are consistent."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_citation_matches_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    wanted = (PROJECT["name"], PROJECT["version"], PROJECT["license"])
    assert (citation["title"], citation["version"], citation["license"]) == wanted


def bare(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def test_constraints_pin_all_user_dependencies():
    """`pip install --constraint` needs all dependencies and those of the user-facing extras."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {bare(line) for line in lines if "==" in line}
    extras = PROJECT["optional-dependencies"]
    wanted = {bare(each) for each in PROJECT["dependencies"] + extras["demo"] + extras["speech"]}
    assert wanted <= pinned


def test_pre_commit_hooks_match_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        assert hook["entry"].replace(".venv/bin", "$(BIN)").split(" --no-logo")[0] in makefile


def test_github_actions_run_ci():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands[0] == ".ci/run"
    assert {command.split()[1] for command in commands[1:]} <= set(targets)


def test_the_supported_versions_of_python_are_the_same_everywhere():
    stated = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    first, end = map(int, stated.groups())
    versions = [f"3.{minor}" for minor in range(first, end)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    steps = [step.get("with", {}) for job in jobs.values() for step in job["steps"]]
    tested = {each for step in steps for each in step.get("python-version", "").split()}
    assert tested == set(versions)
    condition = f"(3, {first}) <= sys.version_info < (3, {end})"
    listed = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    for name, words in (
        ("Makefile", condition),
        ("Makefile", f"Python {versions[0]} to {versions[-1]}"),
        ("megavis/commands/doctor.py", condition),
        ("README.md", listed),
        ("docs/getting-started.md", listed),
    ):
        assert words in (ROOT / name).read_text(), name
    for version in versions:
        assert f"python{version} " in (ROOT / "Makefile").read_text()


def copied_by(dockerfile):
    copied = re.findall(r"^COPY (.*)$", dockerfile.read_text(), re.MULTILINE)
    return [name for line in copied for name in line.split()[:-1]]


DOCKERFILES = sorted((ROOT / "containers").iterdir())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_containers_copy_existing_files(path):
    names = copied_by(path)
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_containers_have_what_runs_in_them(path):
    copied = copied_by(path)
    # Without setup.py the installed package has no configs.
    assert "setup.py" in copied
    documents = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    [job] = [document for document in documents if document["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert f"WORKDIR {container['workingDir']}\n" in path.read_text()
    words = container["command"] + container["args"]
    run = [word for word in words if (ROOT / word).is_file()]
    assert len(run) == 2  # the script and its config
    assert not [word for word in run if word.split("/")[0] not in copied]


def test_agents_file_names_every_package():
    text = (ROOT / "AGENTS.md").read_text()
    folders = [path.parent.name for path in (ROOT / "megavis").glob("*/__init__.py")]
    assert not [name for name in folders if f"`megavis/{name}`" not in text]


@pytest.mark.parametrize("runs", ["runs/a runs/b", ""])
def test_make_cards_exports_each_run(tmp_path, runs):
    """A stub of megavis records its calls; a folder that exists is not exported again."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "exported" / "b").mkdir(parents=True)
    megavis = tmp_path / ".venv" / "bin" / "megavis"
    megavis.parent.mkdir(parents=True)
    megavis.write_text('#!/bin/sh\necho "$@" >> calls\n')
    megavis.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    # Under `make test VENV=...`, the outer make would hand its own environment on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "cards", f"RUNS={runs}", "VENV=.venv"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    if runs:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "calls").read_text() == "export runs/a --to huggingface exported/a\n"
    else:
        assert done.returncode == 2
        assert "no run to export" in done.stderr
