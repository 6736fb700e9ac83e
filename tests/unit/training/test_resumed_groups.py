"""Resuming from a checkpoint with other optimizer parameter groups."""

import json

import pytest

from megavis.cli import main


def decays_if_vector(parameter, *, embeddings):
    return parameter.ndim == 1


def test_resume_restores_state_across_parameter_groups(small_config, tmp_path):
    words = ["schedule={decay: constant}", "training.log_every=1", "optimizer.weight_decay=1e-9"]

    def train(name, steps):
        words_of_run = [f"name={name}", f"output={tmp_path}", f"training.steps={steps}"]
        assert main(["train", str(small_config), "--device", "cpu", *words, *words_of_run]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("loss") for line in lines]

    whole = train("whole", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megavis.training.optimizer.decays", decays_if_vector)
        train("resumed", 3)
    # The decay is too small to change the loss; a misplaced moment would.
    assert train("resumed", 6) == pytest.approx(whole, rel=1e-6)
