"""A training step that does not fit into the memory of the device."""

import pytest
import torch

from megavis.cli import main
from megavis.training.engine import Engine

pytestmark = pytest.mark.once


@pytest.fixture
def fails_at(monkeypatch):
    """Return a function that makes one step of later runs fail."""
    step = Engine.train_step

    def set_step(failing):
        def run(engine, batches, number):
            if number == failing:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            return step(engine, batches, number)

        monkeypatch.setattr(Engine, "train_step", run)

    return set_step


@pytest.mark.parametrize(
    ("size", "choices"),
    [(6, "a micro-batch of 6 images {}; use 3, or"), (1, "a micro-batch of 1 image {}; use ")],
)
def test_first_step_names_the_keys(small_config, tmp_path, fails_at, capsys, size, choices):
    fails_at(0)
    words = [f"output={tmp_path}", "training.batch_size=6", f"training.micro_batch_size={size}"]
    assert main(["train", str(small_config), *words, "--device", "cpu"]) == 2
    expected = choices.format("does not fit into the memory of cpu") + " training.precision bf16,"
    message = capsys.readouterr().err
    assert f"command line: training.micro_batch_size: {expected}".replace("  ", " ") in message


def test_later_steps_may_be_tried_again(small_config, tmp_path, fails_at):
    """Something else may have taken the memory: launchers restart after any other exit code."""
    fails_at(1)
    with pytest.raises(torch.OutOfMemoryError):
        main(["train", str(small_config), f"output={tmp_path}", "--device", "cpu"])
