"""`megavis plan` counts the frozen network that encodes images in each step."""

import json
from pathlib import Path

import pytest
import vae_config

from megavis.cli import main

pytestmark = pytest.mark.once

DEMO = str(Path(__file__).parents[2] / "yaml_configs/givt/demo.yaml")
PLAN = ["plan", DEMO, "--gpus", "1", "data.image_size=16", "objective.latent_channels=4"]


def test_network_that_does_not_exist_is_named(capsys):
    assert main([*PLAN, "objective.tokenizer=runs/not_there"]) == 0
    said = "runs/not_there (objective.tokenizer), which does not exist yet and is NOT COUNTED"
    assert said in capsys.readouterr().out


def test_network_is_counted_from_its_config(tmp_path, capsys):
    """Its run need not exist: a VAE's pass is part of the step's memory and time."""
    tokenizer = ["objective.tokenizer=runs/small", "objective.downsampling=4"]
    written = tmp_path / "written.yaml"
    words = [*PLAN, *tokenizer, "--tokenizer", str(vae_config.write_config(tmp_path))]
    assert main([*words, "--json", "--write", str(written)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["uncounted"], plan["frozen"][0]["name"]) == ([], "runs/small")
    assert plan["asked"]["memory"]["states"]["frozen"] == plan["frozen"][0]["weights"]
    assert plan["asked"]["time"]["encoding"] > 0
    assert f"--tokenizer {tmp_path / 'vae.yaml'}" in written.read_text()
