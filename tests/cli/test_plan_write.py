"""`megavis plan --write` writes a config that trains what was planned."""

from pathlib import Path

import pytest

from megavis.cli import main
from megavis.config.load import load_config

DEMO = Path(__file__).parents[2] / "yaml_configs" / "igpt" / "demo.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ["training.batch_size=16", "optimizer.learning_rate=1e-4", "name=wider"],
        ["model.preset=vit_s", "training.precision=bf16", "parallel.zero_stage=1"],
        # A mapping replaces its section.
        ["schedule={warmup_steps: 7}", "data.palette=null"],
    ],
    ids=["numbers", "preset", "section"],
)
def test_written_config_keeps_overrides(tmp_path, words, capsys):
    written = tmp_path / "runs" / "planned.yaml"
    written.parent.mkdir()
    assert main(["plan", str(DEMO), *words, "--gpus", "2", "--write", str(written)]) == 0
    asked, planned = load_config(DEMO, words).config, load_config(written).config
    assert planned.name == ("wider" if "name=wider" in words else "runs_planned")
    assert planned.training.micro_batch_size is not None
    chosen = {"name": planned.name, "parallel": planned.parallel}
    training = {"micro_batch_size": planned.training.micro_batch_size}
    chosen["training"] = asked.training.model_copy(update=training)
    assert planned == asked.model_copy(update=chosen)
