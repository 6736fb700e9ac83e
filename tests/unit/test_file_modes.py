"""Whoever may read a folder may read every file in it: modes follow the umask alone.

The umask is set in child processes, since it belongs to a whole process.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.once

RUN = """
import sys
from data_tools.__main__ import main as data_tools
from megavis.cli import main
config, shards = sys.argv[1:]

def run(command, words):
    assert command(words.split()) == 0, words

run(data_tools, "letters letters --letters 2 --images 64 --selection-images 8 --validation-images 8"
    " --workers 0")
for part in ("train", "validation"):
    run(data_tools, f"palette shards letters/{part} --out {part} --size 8 --workers 0"
        f" --palette {shards}/palette.npy")
run(data_tools, "jpeg letters/train --out jpeg_shards --workers 0")
run(data_tools, "inspect jpeg_shards --out sheets/sheet.png")
run(main, f"train {config} --device cpu output=runs data.train=train data.validation=null"
    " schedule.warmup_steps=0 training.steps=2 checkpoint.every=1 training.sample_every=2"
    " training.sample_images=2")
run(main, "probe runs/tiny --train train --validation validation --device cpu")
run(main, "export runs/tiny --to huggingface exports/hub")
run(main, "export runs/tiny --to safetensors exports/weights.safetensors")
run(main, "import huggingface exports/hub imported")
run(main, "report runs/tiny")
"""


def wrong_modes(folder, umask):
    """Return the paths whose mode is not that of a new file or folder."""
    found = {str(path.relative_to(folder)): path.stat().st_mode for path in folder.rglob("*")}
    right = {True: 0o40777 & ~umask, False: 0o100666 & ~umask}
    return {
        name: oct(mode) for name, mode in found.items() if mode != right[(folder / name).is_dir()]
    }


def test_files_of_runs_exports_and_shards(tiny_config, shards, tmp_path):
    words = [sys.executable, "-c", RUN, str(tiny_config), str(shards)]
    done = subprocess.run(words, cwd=tmp_path, umask=0o002, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds >= {".safetensors", ".json", ".jsonl", ".yaml", ".npy", ".png", ".tar", ".html"}
    assert wrong_modes(tmp_path, 0o002) == {}


WRITE = """
import torch
from pathlib import Path
from megavis.checkpoint.format.tensor_files import save_tensors
save_tensors(Path("new.safetensors"), {"x": torch.ones(2)}, {"format": "pt"})
save_tensors(Path("old.safetensors"), {"x": torch.ones(2)}, {"format": "pt"})
"""


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0])
def test_tensor_files(tmp_path, umask):
    (tmp_path / "old.safetensors").touch(mode=0o600)
    words = [sys.executable, "-c", WRITE]
    subprocess.run(words, cwd=tmp_path, umask=umask, check=True)
    assert wrong_modes(tmp_path, umask) == {}
