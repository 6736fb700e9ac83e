"""Which checkpoints fine-tuning keeps, and which one it evaluates."""

import json

import pytest

from megavis.checkpoint.format.folder import saved_steps
from megavis.checkpoint.state import save
from megavis.cli import main
from megavis.training.callbacks.validation import EarlyStopping

pytestmark = pytest.mark.once


@pytest.fixture
def tune(small_config, tmp_path, monkeypatch):
    """Fine-tune with given accuracies, one after every step; return the run's folder."""

    def tune(accuracies, *words):
        call = EarlyStopping.__call__

        def decide(self, state):
            if state.step:
                state.record["validation_accuracy"] = accuracies[state.step - 1]
            call(self, state)

        monkeypatch.setattr(EarlyStopping, "__call__", decide)
        settings = ["finetune={num_classes: 3}", f"training.steps={len(accuracies)}", *words]
        settings += ["training.validate_every=1", "name=best", f"output={tmp_path}"]
        assert main(["train", str(small_config), "--device", "cpu", *settings]) == 0
        return tmp_path / "best"

    return tune


def test_best_step_without_a_checkpoint(tune, monkeypatch):
    """The best step could not be saved: the best of those saved is kept, and evaluated."""
    write = save.write_tensors

    def fail_at_best(path, tensors):
        if "00000002" in str(path):
            raise OSError("disk full")
        return write(path, tensors)

    monkeypatch.setattr(save, "write_tensors", fail_at_best)
    folder = tune([0.5, 0.9, 0.1, 0.2, 0.3], "checkpoint={every: 1, keep_last: 1}")
    assert saved_steps(folder) == [1, 5]
    report = folder / "evaluation" / "finetune_test.json"
    assert json.loads(report.read_text())["step"] == 1


def test_best_steps_do_not_displace_the_checkpoints_for_rollbacks(tune):
    words = [
        "training.max_bad_steps=2",
        "training.rollback_margin=2",
        "training.spike_threshold=99",
    ]
    words += ["training.max_rollbacks=1", "checkpoint={every: 4, keep_last: 2}"]
    folder = tune([step / 10 for step in range(10)], *words)
    assert saved_steps(folder) == [4, 8, 9, 10]
