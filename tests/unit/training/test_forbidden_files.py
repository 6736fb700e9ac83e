"""A file that this user may not read is said in one sentence, and no launcher tries it again."""

import json
import os
import subprocess
import sys

import pytest
from unprivileged import unprivileged

pytestmark = pytest.mark.once

RESUME = """
import contextlib, io, json, sys
from pathlib import Path
from megavis.cli import main
config, *forbidden = sys.argv[1:]
words = ["train", config, "--device", "cpu", "schedule.warmup_steps=0", "checkpoint.every=1"]
assert main([*words, "training.steps=2"]) == 0
run = Path("runs/tiny")
found = {}
for name in forbidden:
    mode = (run / name).stat().st_mode
    (run / name).chmod(0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main([*words, "training.steps=3"])
        except BaseException as error:
            code = repr(error)
    (run / name).chmod(mode)
    found[name] = code, said.getvalue()
print(json.dumps(found))
"""
FORBIDDEN = [
    "checkpoints/step-00000002/rank-00000.safetensors",
    "checkpoints/step-00000002/manifest.json",
    "checkpoints/step-00000002",
    "checkpoints/latest",
    "checkpoints",
    "config.yaml",
    "metrics.jsonl",
    "../../train/manifest.json",
    "../../train/palette.npy",
    "../../train/samples.index",
    "../../train/shard-000000.tar",
    "../../train",
    ".",
]


@pytest.fixture(scope="module")
def answers(tiny_config, shards, tmp_path_factory):
    """Code and words of resuming, by the path that may not be read."""
    folder = tmp_path_factory.mktemp("forbidden")
    for source in (shards / "train").iterdir():
        (folder / "train").mkdir(exist_ok=True)
        (folder / "train" / source.name).write_bytes(source.read_bytes())
    config = folder / "tiny.yaml"
    text = tiny_config.read_text().replace(str(shards / "train"), "train")
    config.write_text(text.replace(f"output: {tiny_config.parent}/runs", "output: runs"))
    words = unprivileged([sys.executable, "-c", RESUME, str(config), *FORBIDDEN])
    done = subprocess.run(words, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in (folder / "runs/tiny/checkpoints").iterdir())
    assert kept == ["latest", "step-00000001", "step-00000002"], "nothing is damaged"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORBIDDEN)
def test_resuming_names_what_may_not_be_read(answers, name):
    code, said = answers[name]
    assert code == 2, said
    errors = [line for line in said.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "Permission denied" in errors[0]
    assert os.path.normpath(f"runs/tiny/{name}") in errors[0]
    assert "Traceback" not in said
