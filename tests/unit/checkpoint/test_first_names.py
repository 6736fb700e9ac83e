"""Parameter names and shapes change on purpose only.

`first_names.json` was written on 2026-11-26, when the parts of the first layer were named by their
role and the projections of attention became one. From the first release on, whoever renames a
parameter must make `megavis checkpoint convert` accept the old name.
"""

import json
import re
from pathlib import Path

import pytest

FIRST = json.loads(Path(__file__).with_name("first_names.json").read_text(encoding="utf-8"))
SIZES = "num_layers: 2, hidden_size: 16, num_attention_heads: 2, normalization: layer_norm"


def config_text(objective, model):
    """Return a config; `model` is None if the objective defines its own network."""
    rest = "" if model is None else f"model: {{{SIZES}, add_bias: true, {model}}}\n"
    if model and "relative" in model:
        rest += "finetune: {num_classes: 3}\n"  # MP3 supports these positions only in fine-tuning
    return f"""
name: first
objective: {objective}
{rest}data: {{train: shards, validation: shards, image_size: 16}}
optimizer: {{learning_rate: 1e-3, betas: [0.0, 0.99]}}
training: {{steps: 2, batch_size: 2, validate_every: 1}}
"""


@pytest.mark.parametrize("name", list(FIRST))
def test_parameter_names_and_shapes_are_stable(context, tmp_path, name):
    from megavis.config.load import load_config
    from megavis.papers import build_objective

    first = FIRST[name]
    path = tmp_path / "first.yaml"
    path.write_text(config_text(first["objective"], first["model"]), encoding="utf-8")
    found = {}
    for plan in build_objective(load_config(path).config, context).layer_plans():
        for parameter, tensor in plan.build().named_parameters():
            full = re.sub(r"^blocks\.\d+\.", "blocks.*.", f"{plan.name}.{parameter}")
            found[full] = "x".join(map(str, tensor.shape))
    assert found == first["parameters"]
