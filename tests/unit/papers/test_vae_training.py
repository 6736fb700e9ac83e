"""Training a VAE with `megavis train`: metrics, figures and resuming."""

import json

import pytest
from vae_config import write_config

from megavis.cli import main

pytestmark = pytest.mark.once


def test_train_and_resume(tmp_path, image_shards):
    path = write_config(tmp_path, image_shards)
    assert main(["train", str(path), "--device", "cpu"]) == 0
    lines = (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    errors = [r["validation_squared_error"] for r in records if "validation_loss" in r]
    assert errors[-1] < 0.8 * errors[0]
    assert {"validation_kl", "validation_adversarial"} <= records[-1].keys()
    assert (tmp_path / "small" / "samples" / "step-00000010.png").exists()
    assert main(["train", str(path), "training.steps=11", "--device", "cpu"]) == 0
