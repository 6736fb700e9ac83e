"""The notebooks of docs/notebooks run from first to last cell and reach the described results."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
# Appended to each notebook as its last cell.
CHECKS = {
    "first_steps": """
assert images.shape == (8, 8, 8, 3)
assert trained < untrained - 0.5, (trained, untrained)
""",
    "features": """
assert features.shape == (4, len(train), 64)
# Chance is 0.17.
assert min(max(trained), pixels) > 0.25, (trained, untrained, pixels)
assert not torch.equal(features, run.untrained().features(train))
labels = np.array([train_labels[found] for found in nearest.numpy()])
wanted = np.array(sorted(set(test_labels)))[:, None]
assert (labels == wanted).mean() > 0.2, labels
""",
    "sampling": """
halves = images[:, :4].float(), completed[:, :4].float()
assert (halves[0] - halves[1]).abs().max() <= 1
assert not torch.equal(guided[0.0], guided[2.0])
assert torch.equal(run.sample(labels=labels, seed=1, temperature=0.5), guided[0.0])
""",
    "adding_a_paper": """
import json
assert spiral(3) == [0, 1, 2, 5, 8, 7, 6, 3, 4]
lines = Path("runs/spiral/metrics.jsonl").read_text().splitlines()
losses = [each["validation_loss"] for each in map(json.loads, lines) if "validation_loss" in each]
assert losses[-1] < losses[0] - 0.5, losses
""",
}


def test_each_notebook_has_a_check():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(CHECKS)


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory):
    """The folder of all notebooks, as in a checkout."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize("name", CHECKS)
def test_notebook_runs(name, working_folder, tmp_path, monkeypatch):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    stored = [cell.get("outputs") for cell in notebook.cells]
    assert not any(stored), "store notebooks without outputs"
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    resources = {"metadata": {"path": working_folder}}
    # Other processes may take a port between its choice and its use.
    client = NotebookClient(
        # A kernel imports for minutes if others keep all cores busy.
        notebook,
        timeout=900,
        startup_timeout=300,
        kernel_name="python3",
        resources=resources,
    )
    sockets = {"transport": "ipc", "ip": str(tmp_path / "kernel")}
    client.config = Config({"ConnectionFileMixin": sockets})
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [each for each in shown if "Traceback" in each.get("text", "")]
