"""Training output: lines in a log; a bar and validation lines on a terminal."""

import io

import pytest
import torch
from terminal import Terminal

from megavis.training.callbacks.callback import ShowProgress, StepState


def shown(stream, monkeypatch):
    """Return the output of three steps."""
    monkeypatch.setattr("sys.stderr", stream)
    progress = ShowProgress(0, 3)
    for step, record in enumerate(
        [
            {"validation_loss": 6.0},
            {"loss": 5.0, "lr": 0.125},
            {"loss": 4.0, "lr": 0.125, "validation_loss": 4.5},
            {},
        ]
    ):
        loss = torch.tensor(1.0) if step else None
        progress(StepState(step, 3, loss, engine=None, record=record))
    return stream.getvalue()


def test_log_has_one_line_per_recorded_step(monkeypatch):
    assert shown(io.StringIO(), monkeypatch).splitlines() == [
        "step 0/3  validation_loss 6",
        "step 1/3  loss 5  lr 0.125",
        "step 2/3  loss 4  validation_loss 4.5  lr 0.125",
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_terminal_has_a_bar_and_validation_lines(monkeypatch):
    text = shown(Terminal(), monkeypatch)
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    assert [line for line in lines if line.startswith("step ")] == [
        "step 0/3  validation_loss 6",
        "step 2/3  validation_loss 4.5",
    ]
    assert "3/3" in lines[-1]
    assert "loss 4" in lines[-1]
    assert "lr" not in text
