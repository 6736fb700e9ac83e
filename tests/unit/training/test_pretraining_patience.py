"""Early stopping of pre-training by the accuracy of predicted positions (MP3, section 4.3)."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from tiny import BLOCK_OBJECTIVES, VIT, tiny

from megavis.checkpoint.format.folder import chosen_checkpoint, saved_steps, step_folder
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.training.callbacks.validation import EarlyStopping
from megavis.training.search.trial import is_finished

pytestmark = pytest.mark.once

ACCURACIES = [0.1, 0.4, 0.3, 0.2, 0.3, 0.9]


@pytest.fixture
def config(image_shards, tmp_path):
    """An MP3 that is validated after every step."""
    path = tmp_path / "tiny.yaml"
    text = tiny(BLOCK_OBJECTIVES["mp3"], shards=image_shards, validates=True, model=VIT)
    path.write_text(f"{text}output: {tmp_path}\n")
    return path


@pytest.fixture
def train(config, monkeypatch, tmp_path):
    """Train with given accuracies, one after every step; return the run's folder."""

    def train(*words, code=0):
        call = EarlyStopping.__call__

        def decide(self, state):
            if state.step:
                state.record["validation_accuracy"] = ACCURACIES[state.step - 1]
            call(self, state)

        monkeypatch.setattr(EarlyStopping, "__call__", decide)
        settings = [f"training.steps={len(ACCURACIES)}", "training.validate_every=1"]
        settings += ["training.validation_images=8", "checkpoint={every: 1, keep_last: 1}", *words]
        assert main(["train", str(config), "--device", "cpu", *settings]) == code
        return tmp_path / "tiny"

    return train


def test_stops_and_keeps_the_best_step(train, capsys):
    folder = train("training.patience=3")
    # Three validations after step 2 are no better.
    assert saved_steps(folder) == [2, 5]
    assert chosen_checkpoint(folder).name == "step-00000002"
    assert chosen_checkpoint(folder, 5).name == "step-00000005"
    record = json.loads((folder / "evaluation" / "early_stopping.json").read_text())
    assert record == {"step": 2, "validation_accuracy": 0.4}
    assert "best step 2: validation accuracy 40.0%" in capsys.readouterr().out
    # Started again, it has already stopped.
    train("training.patience=3")
    assert saved_steps(folder) == [2, 5]


def test_a_run_that_stopped_early_is_finished(train):
    """`evaluate watch` waits for the end, and a search would train it at every start."""
    folder = train("training.patience=3")
    config = load_config(folder / "config.yaml").config
    assert is_finished(config, folder)
    # A kill came before the best step was recorded.
    (folder / "evaluation" / "early_stopping.json").unlink()
    assert not is_finished(config, folder)
    train("training.patience=3")
    assert is_finished(config, folder)
    more = load_config(folder / "config.yaml", ["training.patience=4"]).config
    assert not is_finished(more, folder)


def test_a_best_step_that_cannot_be_printed_is_recorded(train, monkeypatch):
    """The output is on a full disk, and the run is not."""
    with Path("/dev/full").open("w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        folder = train("training.patience=3")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            output.close()
    assert chosen_checkpoint(folder).name == "step-00000002"


def test_pruning_by_hand_keeps_the_best_step(train, capsys):
    folder = train("training.patience=3", "checkpoint.keep_last=9")
    assert saved_steps(folder) == [1, 2, 3, 4, 5]
    assert main(["checkpoint", "prune", str(folder), "--keep-last", "1"]) == 0
    assert saved_steps(folder) == [2, 5]
    shutil.rmtree(step_folder(folder, 2))
    with pytest.raises(UserError, match="no checkpoint of step 2, which early stopping chose"):
        chosen_checkpoint(folder)


def test_goes_on_with_more_patience(train):
    folder = train("training.patience=3")
    train("training.patience=5")
    assert chosen_checkpoint(folder).name == "step-00000006"
    assert saved_steps(folder) == [6]


def test_goes_on_without_patience(train):
    """The step that was chosen before is no longer kept, and no longer opened."""
    folder = train("training.patience=3")
    train("training.patience=0")
    assert saved_steps(folder) == [6]
    assert chosen_checkpoint(folder).name == "step-00000006"


def test_a_finished_run_keeps_the_best_step_without_patience(train):
    folder = train("training.patience=3", "training.steps=4", "checkpoint.keep_last=9")
    train("training.patience=0", "training.steps=4", "checkpoint.keep_last=9")
    assert chosen_checkpoint(folder).name == "step-00000002"


def test_without_patience_the_last_step_is_taken(train):
    folder = train()
    assert saved_steps(folder) == [6]
    assert chosen_checkpoint(folder).name == "step-00000006"
    assert not (folder / "evaluation" / "early_stopping.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.validation=null"], "training.patience: needs data.validation"),
        (["training.validate_every=0"], "training.patience: needs training.validate_every"),
        (["finetune={num_classes: 3}"], "training.patience: is for pre-training"),
        (
            ["objective={name: mae, patch_size: 4}"],
            "training.patience: mae measures no accuracy in pre-training",
        ),
    ],
)
def test_needs_an_accuracy(train, capsys, words, message):
    train("training.patience=3", *words, code=2)
    assert message in capsys.readouterr().err
