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


TUNED = ["finetune.num_classes=3", "finetune.tuned_blocks=1", "training.validate_every=1"]
BF16, ZERO_3 = "training.precision bf16", "parallel.zero_stage 3"
RECOMPUTED = "parallel.activation_checkpointing"
SELECTIVE = "parallel.activation_checkpointing=selective"


@pytest.mark.parametrize(
    ("size", "words", "choices"),
    [
        (6, [], f"; use 3 or {BF16} or {RECOMPUTED} selective or {ZERO_3}"),
        (1, [], f"; use {BF16} or {RECOMPUTED} selective or {ZERO_3}"),
        # What is in use already is not suggested.
        (1, ["training.precision=bf16", SELECTIVE], f"; use {RECOMPUTED} full or {ZERO_3}"),
        # Nor what the config's other keys rule out.
        (1, ["training.precision=bf16", *TUNED], ""),
    ],
)
def test_first_step_names_keys_that_would_help(
    small_config, tmp_path, fails_at, capsys, size, words, choices
):
    fails_at(0)
    words = [*words, "training.batch_size=6", f"training.micro_batch_size={size}"]
    words += [f"output={tmp_path}", "parallel.zero_stage=2"]
    command = "finetune" if TUNED[0] in words else "train"
    assert main([command, str(small_config), *words, "--device", "cpu"]) == 2
    images = "6 images" if size == 6 else "1 image"
    text = (
        f"training.micro_batch_size: a micro-batch of {images} does not fit into the memory of cpu"
    )
    assert f"command line: {text}{choices} (megavis plan" in capsys.readouterr().err


def test_later_steps_may_be_tried_again(small_config, tmp_path, fails_at):
    """Something else may have taken the memory: launchers restart after any other exit code."""
    fails_at(1)
    with pytest.raises(torch.OutOfMemoryError):
        main(["train", str(small_config), f"output={tmp_path}", "--device", "cpu"])
