"""An interrupted export leaves no folder that looks finished."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import VIT, tiny

from megavis.cli import main
from megavis.commands import weights
from megavis.config.load import load_config
from megavis.weights import exports, released
from megavis.weights.released import read_hub_weights, write_run

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("context")]

# Kills the process after the weights are written, before the model card.
KILLED = """
import os, signal, sys
from megavis.cli import main
from megavis.commands import weights
from megavis.weights import exports, released
exports._write_card = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
main(["export", sys.argv[1], "--to", "huggingface", sys.argv[2]])
"""
DECODER = "decoder: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}"
MAE = tiny(f"{{name: mae, patch_size: 4, mask_ratio: 0.7, {DECODER}}}", model=VIT)


@pytest.fixture
def run(tmp_path, build_paper):
    """The folder of a small MAE with random weights."""
    path = tmp_path / "mae.yaml"
    path.write_text(MAE)
    _, inference = build_paper(MAE)
    weights = {name: value.detach() for name, value in inference.layers.named_parameters()}
    write_run(tmp_path / "run", load_config(path).config, weights)
    return tmp_path / "run"


def test_killed_export_leaves_no_folder(run, tmp_path):
    out = tmp_path / "exported" / "mae"
    command = [sys.executable, "-c", KILLED, str(run), str(out)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [left] = out.parent.iterdir()
    assert left != out
    assert list(left.glob("*.safetensors"))

    assert main(["export", str(run), "--to", "huggingface", str(out)]) == 0
    assert list(out.parent.iterdir()) == [out]
    assert (out / "README.md").exists()


def test_interrupted_export_leaves_nothing(run, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".mae.partial"]
        raise KeyboardInterrupt

    monkeypatch.setattr(exports, "_write_card", interrupt)
    words = ["export", str(run), "--to", "huggingface", str(tmp_path / "out" / "mae")]
    assert main(words) == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_single_file_export_is_atomic(run, tmp_path):
    out = tmp_path / "mae.safetensors"
    assert main(["export", str(run), "--to", "safetensors", str(out)]) == 0
    assert load_file(out)
    assert not list(tmp_path.glob(".*"))


def test_an_import_leaves_a_run_that_was_written_meanwhile(run, tmp_path, monkeypatch, capsys):
    exported, target = tmp_path / "mae", tmp_path / "imported"
    assert main(["export", str(run), "--to", "huggingface", str(exported)]) == 0
    words, read = ["import", "huggingface", str(exported), str(target)], read_hub_weights

    def read_meanwhile(folder):
        """Read weights, as another process imports them too."""
        monkeypatch.setattr(released, "read_hub_weights", read)
        assert main(words) == 0
        return read(folder)

    monkeypatch.setattr(released, "read_hub_weights", read_meanwhile)
    capsys.readouterr()
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {target} exists; choose another name\n"
    assert main(["checkpoint", "verify", str(target)]) == 0


@pytest.mark.parametrize("form", ["huggingface", "safetensors"])
def test_an_export_leaves_what_was_written_meanwhile(run, tmp_path, monkeypatch, capsys, form):
    target, read = tmp_path / "out", weights.read_weights

    def read_meanwhile(folder):
        target.mkdir()
        (target / "file").touch()
        return read(folder)

    module = weights if form == "safetensors" else exports
    monkeypatch.setattr(module, "read_weights", read_meanwhile)
    assert main(["export", str(run), "--to", form, str(target)]) == 2
    assert capsys.readouterr().err == f"error: {target} exists; choose another name\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "mae.yaml",
        "out",
        "run",
        "small.yaml",
    ]
